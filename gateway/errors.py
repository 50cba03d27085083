"""Errors as the OpenAI API shapes them. Source: OpenAI API reference, error codes."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import ContextExceeded, InvalidRequest
from gateway.body import BodyLate, ServerEnding
from protocol.wire import Failed

CLIENT_GONE = 499  # nobody reads it; nginx's code, for logs

_STATUS = {
    "invalid": 400,
    "context_length_exceeded": 400,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "late": 408,
    "unsupported": 415,
    "overloaded": 429,
    "lost": 503,
    "internal": 500,
}
_TYPES = {
    "invalid": "invalid_request_error",
    "context_length_exceeded": "invalid_request_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "method": "invalid_request_error",
    "late": "invalid_request_error",
    "unsupported": "invalid_request_error",
    "overloaded": "rate_limit_exceeded",
}
_HEADERS = {
    "overloaded": {"retry-after": "1"},
    "late": {"connection": "close"},  # what is left of the body must not be read as the next request
    "lost": {"connection": "close"},
}
_CODES = {404: "not_found", 405: "method"}
_OF_ERRORS: dict[type[Exception], str] = {
    ContextExceeded: "context_length_exceeded",  # an InvalidRequest, too
    InvalidRequest: "invalid",
    BodyLate: "late",
    ServerEnding: "lost",
}
# Fields of the engine's requests by where a body has them.
_OURS = {name: f"dockyard.{name}" for name in ("slack_ms", "generated_ids", "resumed")}


def error_response(code: str, message: str, parameter: str = "", retry_after_s: float = 0.0) -> Response:
    """A whole reply that says what is wrong. `retry_after_s`: when to try again, where somebody knows."""
    content = msgspec.json.encode({"error": error_object(code, message, parameter)})
    headers = dict(_HEADERS.get(code, {}))
    if retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    return Response(content, _STATUS[code], headers, media_type="application/json")


def refusal_response(error: InvalidRequest) -> Response:
    """The whole reply to a request that cannot be served."""
    return error_response(error_code(error), str(error), error.parameter)


def error_code(error: Exception) -> str:
    """Of what keeps a request from its answer before an engine has it."""
    return next((code for kind, code in _OF_ERRORS.items() if isinstance(error, kind)), "internal")


def failure_response(failure: Failed) -> Response:
    """The whole reply to a request that the engine has ended."""
    return error_response(failure.code, failure.message, failure.parameter, failure.retry_after_s)


def error_object(code: str, message: str, parameter: str) -> dict[str, Any]:
    """The value of `error`, for whole replies and for streams."""
    return {
        "message": message,
        "type": _TYPES.get(code, "server_error"),
        "param": _OURS.get(parameter, parameter) or None,
        "code": code,
    }


def answer_errors(app: FastAPI) -> None:
    """Shapes the errors that no route answers itself: no such path, no whole body, a fault of ours."""
    for kind, answer in _ANSWERS.items():
        app.add_exception_handler(kind, answer)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "invalid")
    return error_response(code, f"{request.method} {request.url.path[:200]}: {error.detail}")


async def _late(request: Request, error: Exception) -> Response:
    return error_response(error_code(error), "the request's body was not whole in its time", "body")


async def _ending(request: Request, error: Exception) -> Response:
    return error_response(error_code(error), "the server is ending")


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _fault(request: Request, error: Exception) -> Response:
    return error_response("internal", "the server has failed; its log says why")


_ANSWERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _no_route,
    BodyLate: _late,
    ServerEnding: _ending,
    ClientDisconnect: _gone,
    Exception: _fault,
}
