"""The HTTP surface: its routes."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from engine.errors import InvalidRequest
from gateway.answering import ReplyWriter, answer
from gateway.body import read_body
from gateway.chat_reply import ReplyHead
from gateway.chat_request import parse_chat, prepare_chat
from gateway.chat_writer import ChatWriter
from gateway.completion_body import parse_completion
from gateway.completion_request import prepare_completion
from gateway.completion_writer import CompletionWriter
from gateway.errors import answer_errors, error_code, error_response, refusal_response
from gateway.generation import Asked
from gateway.metrics import GatewayMetrics
from gateway.service import ChatService
from gateway.worker_pace import SetPace, is_json, is_this_host, parse_pace
from protocol.clock import SystemClock
from protocol.errors import InvalidInput
from protocol.ids import new_id
from protocol.worker_counts import WorkerCounts

Status = Callable[[], Coroutine[Any, Any, dict[str, Any]]]
Counts = Callable[[], Coroutine[Any, Any, Sequence[tuple[str, WorkerCounts | None]]]]
Prepare = Callable[[bytes, ChatService], Asked]
Write = Callable[[ReplyHead, int], ReplyWriter]


def create_app(
    service: ChatService,
    status: Status,
    counts: Counts,
    set_pace: SetPace,
    threads: Executor | None = None,
) -> FastAPI:
    """The application.

    `status` gives what `/dockyard/status` shows: workers, placement, statistics. `counts`: of each worker, by
    its role, None where it does not answer. `set_pace` slows a worker. `threads`, on which
    prompts are tokenised: None is the loop's own, which come up, or do not, while it serves.
    """
    app = FastAPI(title="Dockyard", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)
    metrics = GatewayMetrics(service.model.name)
    clock = SystemClock()

    async def chat_completions(request: Request) -> Response:
        return await generated(request, _prepared_chat, "chatcmpl", ChatWriter)

    async def completions(request: Request) -> Response:
        return await generated(request, _prepared_completion, "cmpl", CompletionWriter)

    async def begun(request: Request, prepare: Prepare, prefix: str, write: Write) -> Response:
        body = await read_body(request, service.config, service.ending)
        arrived_ns = clock.now_ns()  # before tokenising: that is a part of what the client waits for
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(threads, prepare, body, service)  # seconds, for a long one
        timed = tuple(replace(generation, arrived_ns=arrived_ns) for generation in asked.generations)
        head = ReplyHead(new_id("req").replace("req-", f"{prefix}-"), int(time.time()), service.model.name)
        writer = write(head, asked.num_prompt)
        return await answer(request, service, metrics, replace(asked, generations=timed), writer)

    async def generated(request: Request, prepare: Prepare, prefix: str, write: Write) -> Response:
        try:
            return await begun(request, prepare, prefix, write)
        except ClientDisconnect:
            raise
        except Exception as error:
            metrics.failed(error_code(error))
            if isinstance(error, InvalidRequest):
                return refusal_response(error)
            raise

    async def models() -> dict[str, Any]:
        entry = {
            "id": service.model.name, "object": "model", "created": 0, "owned_by": "dockyard",
            "max_model_len": service.model.max_positions,
        }  # fmt: skip
        return {"object": "list", "data": [entry]}

    async def health() -> Response:
        """Ready means that every worker's connection is up."""
        if service.client.lost:
            return error_response("lost", service.client.lost)
        return Response(status_code=200)

    async def metrics_page() -> Response:
        page = metrics.render(service.client.num_running, service.client.num_waiting, await counts())
        return Response(page, media_type="text/plain; version=0.0.4")

    async def pace(request: Request, role: str) -> Response:
        if not is_this_host(request.client.host if request.client else None):
            return error_response("forbidden", "a worker's pace is set from the gateway's own host")
        if "origin" in request.headers:
            return error_response("forbidden", "a worker's pace is not set from a web page", "origin")
        if not is_json(request.headers.get("content-type", "")):
            return error_response("unsupported", "send content-type: application/json", "content-type")
        try:
            factor = parse_pace(await read_body(request, service.config, service.ending))
            await set_pace(role, factor)
        except InvalidRequest as error:
            return refusal_response(error)
        except InvalidInput as error:
            return error_response("not_found", str(error), "role")
        return Response(msgspec.json.encode({"role": role, "factor": factor}), media_type="application/json")

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics_page, methods=["GET"])
    app.add_api_route("/dockyard/status", status, methods=["GET"])
    app.add_api_route("/dockyard/workers/{role}/pace", pace, methods=["POST"])
    return app


def _prepared_chat(body: bytes, service: ChatService) -> Asked:
    model = service.model
    if model.form is None:
        raise InvalidRequest(
            f"the model {model.name} does not chat: {model.no_chat}", parameter="model",
            hint="send text that goes on to /v1/completions, or serve a model that chats",
        )  # fmt: skip
    return prepare_chat(parse_chat(body), model.form, model.tokenizer, model.max_positions, service.config)


def _prepared_completion(body: bytes, service: ChatService) -> Asked:
    model = service.model
    return prepare_completion(
        parse_completion(body), model.tokenizer, model.opening, model.max_positions, service.config
    )
