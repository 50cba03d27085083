"""The answer to a request that asks for text: whole or as a stream, and an end to it when the client goes."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from actors.token_client import RequestFailed
from gateway.chat_reply import DONE, ChoiceResult, failure_chunk
from gateway.choice_reader import Delta
from gateway.errors import CLIENT_GONE, error_object, failure_response
from gateway.generation import Asked
from gateway.metrics import GatewayMetrics
from gateway.service import ChatService

Result = TypeVar("Result")


class ReplyWriter(Protocol):
    """The bytes of one reply."""

    def whole(self, results: Sequence[ChoiceResult]) -> bytes: ...
    def begun(self, index: int) -> bytes: ...
    def events(self, delta: Delta) -> Iterator[bytes]: ...
    def usage(self, results: Sequence[ChoiceResult]) -> bytes: ...


async def answer(
    request: Request, service: ChatService, metrics: GatewayMetrics, asked: Asked, writer: ReplyWriter
) -> Response:
    """Runs to the reply's end, or to a stream's beginning."""
    try:
        if asked.stream:
            return await _stream_response(request, service, metrics, asked, writer)
        results = await unless_gone(request, service.complete(asked.generations))
    except RequestFailed as error:
        metrics.failed(error.failure.code)
        return failure_response(error.failure)
    if results is None:
        metrics.aborted(asked.num_choices)
        return Response(status_code=CLIENT_GONE)
    metrics.prefilled(asked.num_prompt)
    for result in results:
        metrics.finished(result)
    return Response(writer.whole(results), media_type="application/json")


async def _stream_response(
    request: Request, service: ChatService, metrics: GatewayMetrics, asked: Asked, writer: ReplyWriter
) -> Response:
    """Waits for the first text: a request that is refused gets its status code. Raises RequestFailed."""
    deltas = service.deltas(asked.generations)
    first = await unless_gone(request, _first(deltas))
    if first is None:
        metrics.aborted(asked.num_choices)
        return Response(status_code=CLIENT_GONE)
    metrics.prefilled(asked.num_prompt)
    events = _stream(_chain(first, deltas), metrics, asked, writer)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _stream(
    deltas: AsyncGenerator[Delta], metrics: GatewayMetrics, asked: Asked, writer: ReplyWriter
) -> AsyncGenerator[bytes]:
    """Server-sent events. An error ends the stream without a finish reason and without `[DONE]`."""
    results: list[ChoiceResult] = []
    failed = False
    try:
        async with aclosing(deltas):
            for index in range(asked.num_choices):
                if begun := writer.begun(index):
                    yield begun
            async for delta in deltas:
                if delta.lost:
                    failed = True
                    yield _lost_call(metrics, delta.lost)
                    return
                if delta.result is not None:
                    results.append(delta.result)
                    metrics.finished(delta.result)
                for event in writer.events(delta):
                    yield event
    except RequestFailed as error:
        failed = True
        metrics.failed(error.failure.code)
        yield failure_chunk(error_object(error.failure.code, error.message, error.failure.parameter))
        return
    finally:
        if not failed:
            metrics.aborted(asked.num_choices - len(results))
    if asked.include_usage:
        yield writer.usage(results)
    yield DONE


def _lost_call(metrics: GatewayMetrics, reason: str) -> bytes:
    """The end of a stream that has given out pieces of a call which cannot be read.

    A finish reason would say that the arguments are whole.
    """
    metrics.failed("broken_call")
    return failure_chunk(error_object("broken_call", f"the model's call cannot be read: {reason}", ""))


async def _first(deltas: AsyncGenerator[Delta]) -> Delta:
    try:
        return await anext(deltas)
    except BaseException:
        await deltas.aclose()  # of several prompts the others go on otherwise
        raise


async def _chain(first: Delta, rest: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    async with aclosing(rest):
        yield first
        async for delta in rest:
            yield delta


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
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
