"""The model client against a real HTTP endpoint on loopback."""

import asyncio
import json
import time
from contextlib import asynccontextmanager, suppress

import pytest

from teams.model_client import ChatMessage, ModelError, http_models
from teams.model_reply import MAX_REPLY_BYTES


class Endpoint:
    """Answers one request a connection, as `reply(request)` says: (status, body), or None to stay silent."""

    def __init__(self, reply):
        self.reply = reply
        self.requests = []
        self.conversations = set()
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def serve(self, reader, writer):
        """Closes the connection whatever ends the conversation: one left open outlives its loop."""
        self.conversations.add(asyncio.current_task())
        try:
            await self.converse(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def converse(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((headers, body))
        self.asked.set()
        answer = self.reply(body)
        if answer is None:
            await reader.read()
            self.hung_up.set()
        else:
            status, value = answer
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(data)}\r\n\r\n".encode()
                + data
            )
            with suppress(ConnectionError):  # the client may have had enough
                await writer.drain()

    @asynccontextmanager
    async def client(self, **settings):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        models = http_models(f"http://127.0.0.1:{port}/v1", model="m", run_id="run-1", **settings)
        client = models("ada")
        try:
            yield client
        finally:
            await client.close()
            server.close()
            await server.wait_closed()
            for conversation in self.conversations:
                conversation.cancel()
            await asyncio.gather(*self.conversations, return_exceptions=True)


def answer(text, **extra):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return 200, {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        **extra,
    }


def ask(client, **options):
    return client.complete([ChatMessage("user", "hello")], max_tokens=5, temperature=0.5, **options)


def test_a_call_carries_identity_seed_and_the_forced_text():
    async def scene():
        def reply(body):
            now = time.monotonic_ns()
            span = {"kind": "model.decode", "start_ns": now - 10, "end_ns": now}
            return answer(
                body["dockyard"]["forced_text"], dockyard={"timeline": [span], "request_id": "req-7"}
            )

        endpoint = Endpoint(reply)
        async with endpoint.client() as client:
            completion = await ask(client, seed=3, forced="as told")
        ((headers, body),) = endpoint.requests
        assert headers["authorization"] == "bearer dk-run-1.ada"
        assert (body["seed"], body["max_tokens"], body["temperature"]) == (3, 5, 0.5)
        assert completion.text == "as told"
        assert completion.request_id == "req-7"
        assert completion.timeline[0].measured == "gateway"

    asyncio.run(scene())


def test_a_foreign_endpoint_gets_its_own_key_and_nothing_of_ours():
    async def scene():
        endpoint = Endpoint(lambda body: answer("hi"))
        async with endpoint.client(api_key="sk-theirs") as client:
            completion = await ask(client, seed=None)
        ((headers, body),) = endpoint.requests
        assert headers["authorization"] == "bearer sk-theirs"
        assert "seed" not in body
        assert "dockyard" not in body
        assert completion.timeline[0].measured == "client"

    asyncio.run(scene())


def test_a_failure_is_told_once_and_not_retried():
    async def scene():
        endpoint = Endpoint(lambda body: (503, {"error": {"message": "no worker is ready"}}))
        async with endpoint.client() as client:
            with pytest.raises(ModelError, match="no worker is ready"):
                await ask(client, seed=None)
        assert len(endpoint.requests) == 1

    asyncio.run(scene())


@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_that_is_no_json_is_told(status):
    async def scene():
        endpoint = Endpoint(lambda body: (status, b"<html>\x1b[31m</html>"))
        async with endpoint.client() as client:
            with pytest.raises(ModelError, match=r"no chat completion|HTTP 503: <html>"):
                await ask(client, seed=None)

    asyncio.run(scene())


def test_an_answer_without_an_end_is_cut_off():
    async def scene():
        endpoint = Endpoint(lambda body: (200, b" " * (MAX_REPLY_BYTES + 1)))
        async with endpoint.client() as client:
            with pytest.raises(ModelError, match="longer than"):
                await ask(client, seed=None)

    asyncio.run(scene())


def test_an_answer_that_drips_ends_at_the_deadline():
    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)

    async def scene():
        endpoint = Endpoint(None)
        endpoint.converse = drip
        async with endpoint.client(timeout_s=0.3) as client:
            with pytest.raises(ModelError, match=r"no whole answer within 0\.3 s"):
                await ask(client, seed=None)

    asyncio.run(scene())


def test_cancelling_a_call_hangs_up():
    async def scene():
        endpoint = Endpoint(lambda body: None)
        async with endpoint.client() as client:
            call = asyncio.create_task(ask(client, seed=None))
            await endpoint.asked.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(endpoint.hung_up.wait(), 10)

    asyncio.run(scene())


def test_nobody_there_is_an_error():
    async def scene():
        client = http_models("http://127.0.0.1:9/v1", model="m", run_id="run-1")("ada")
        with pytest.raises(ModelError, match=r"m: connection refused: http://127\.0\.0\.1:9/v1"):
            await ask(client, seed=None)
        await client.close()

    asyncio.run(scene())
