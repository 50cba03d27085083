"""The HTTP surface: its routes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from actors.token_client import RequestFailed
from engine.errors import InvalidRequest
from gateway import chat_reply
from gateway.body import read_body
from gateway.chat_reply import ChoiceResult, ReplyHead
from gateway.chat_request import ChatRequest, parse_chat, prepare_chat
from gateway.choice_reader import Delta
from gateway.errors import CLIENT_GONE, answer_errors, error_object, error_response, failure_response
from gateway.metrics import GatewayMetrics
from gateway.service import ChatService
from gateway.worker_pace import SetPace, is_json, is_this_host, parse_pace
from protocol.clock import SystemClock
from protocol.errors import InvalidInput
from protocol.ids import new_id

Result = TypeVar("Result")
Status = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


def create_app(service: ChatService, status: Status, set_pace: SetPace) -> FastAPI:
    """The application.

    `status` gives what `/dockyard/status` shows: workers, placement, statistics. `set_pace` slows a worker.
    """
    app = FastAPI(title="Dockyard", docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)
    metrics = GatewayMetrics(service.model.name)
    clock = SystemClock()

    async def chat_completions(request: Request) -> Response:
        try:
            body = await read_body(request, service.config, service.ending)
            arrived_ns = clock.now_ns()  # before tokenising: that is a part of what the client waits for
            chat = await asyncio.to_thread(
                _prepared, body, arrived_ns, service
            )  # seconds, for a long conversation
        except InvalidRequest as error:
            return error_response("invalid", str(error), error.parameter)
        head = ReplyHead(new_id("req").replace("req-", "chatcmpl-"), int(time.time()), service.model.name)
        try:
            if chat.stream:
                return await _stream_response(request, service, metrics, chat, head)
            results = await _unless_gone(request, service.complete(chat))
        except RequestFailed as error:
            metrics.failed(error.failure.code)
            return failure_response(error.failure)
        if results is None:
            metrics.aborted(len(chat.choices))
            return Response(status_code=CLIENT_GONE)
        metrics.prefilled(len(chat.prompt_ids))
        for result in results:
            metrics.finished(result)
        return Response(chat_reply.whole(head, len(chat.prompt_ids), results), media_type="application/json")

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
        page = metrics.render(service.client.num_running, service.client.num_waiting)
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
            return error_response("invalid", str(error), error.parameter)
        except InvalidInput as error:
            return error_response("not_found", str(error), "role")
        return Response(msgspec.json.encode({"role": role, "factor": factor}), media_type="application/json")

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics_page, methods=["GET"])
    app.add_api_route("/dockyard/status", status, methods=["GET"])
    app.add_api_route("/dockyard/workers/{role}/pace", pace, methods=["POST"])
    return app


def _prepared(body: bytes, arrived_ns: int, service: ChatService) -> ChatRequest:
    model = service.model
    chat = prepare_chat(
        parse_chat(body), model.template, model.tokenizer, model.max_positions, service.config
    )
    return replace(chat, arrived_ns=arrived_ns)


async def _stream_response(
    request: Request, service: ChatService, metrics: GatewayMetrics, chat: ChatRequest, head: ReplyHead
) -> Response:
    """Waits for the first text: a request that is refused gets its status code. Raises RequestFailed."""
    deltas = service.deltas(chat)
    first = await _unless_gone(request, _first(deltas))
    if first is None:
        metrics.aborted(len(chat.choices))
        return Response(status_code=CLIENT_GONE)
    metrics.prefilled(len(chat.prompt_ids))
    events = _stream(_chain(first, deltas), metrics, chat, head)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _stream(
    deltas: AsyncGenerator[Delta], metrics: GatewayMetrics, chat: ChatRequest, head: ReplyHead
) -> AsyncGenerator[bytes]:
    """Server-sent events. An error ends the stream without a finish reason and without `[DONE]`."""
    results: list[ChoiceResult] = []
    failed = False
    try:
        async with aclosing(deltas):
            for index in range(len(chat.choices)):
                yield chat_reply.chunk(head, index, {"role": "assistant", "content": ""})
            async for delta in deltas:
                if delta.text or delta.logprobs:
                    yield chat_reply.chunk(
                        head, delta.index, {"content": delta.text}, logprobs=delta.logprobs or None
                    )
                for number, call in enumerate(delta.calls, delta.num_calls):
                    entry = {"index": number, **chat_reply.call_entry(call)}
                    yield chat_reply.chunk(head, delta.index, {"tool_calls": [entry]})
                if delta.result is not None:
                    results.append(delta.result)
                    metrics.finished(delta.result)
                    yield chat_reply.chunk(head, delta.index, {}, result=delta.result)
    except RequestFailed as error:
        failed = True
        metrics.failed(error.failure.code)
        yield chat_reply.failure_chunk(
            error_object(error.failure.code, error.message, error.failure.parameter)
        )
        return
    finally:
        if not failed:
            metrics.aborted(len(chat.choices) - len(results))
    if chat.include_usage:
        yield chat_reply.usage_chunk(head, len(chat.prompt_ids), results)
    yield chat_reply.DONE


async def _first(deltas: AsyncGenerator[Delta]) -> Delta:
    return await anext(deltas)


async def _chain(first: Delta, rest: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    async with aclosing(rest):
        yield first
        async for delta in rest:
            yield delta


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result, or None after the client has hung up: then the work is cancelled, which aborts it."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        # Both are cancelled before either is waited for: none outlives an error of the other.
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
