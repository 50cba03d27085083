"""The gateway's end of the token sockets, against servers that say what each test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.frames import pack_from_engine, read_to_engine
from actors.token_client import RequestFailed, TokenClient
from protocol.sampling import SamplingParams
from protocol.wire import Abort, Failed, FromEngine, Hello, Submit, ToEngine, Tokens


class Engine:
    """One end of a real socket: what came in, and a way to answer."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[ToEngine] = asyncio.Queue()
        self.connected, self.gone = asyncio.Event(), asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.connected.set()
        try:
            while True:
                message = await read_to_engine(reader)
                if isinstance(message, Hello):
                    self.say()
                self.received.put_nowait(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            self.gone.set()

    def say(self, *messages: FromEngine) -> None:
        assert self._writer is not None
        self._writer.write(pack_from_engine(messages))

    def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def hang_up(self) -> None:
        assert self._writer is not None
        self._writer.close()

    async def expect(self, kind: type) -> ToEngine:
        message = await asyncio.wait_for(self.received.get(), 10)
        assert isinstance(message, kind), message
        return message


def tokens(request_id: str, index: int, *ids: int, end: bool = False) -> Tokens:
    return Tokens(request_id, index, ids, "stop" if end else None, 1, 2, 3, 4, 5, 0)


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[TokenClient, Engine, Engine]]:
    engines = Engine(), Engine()
    paths = [folder / "a.sock", folder / "b.sock"]
    servers = [
        await asyncio.start_unix_server(e.converse, str(p)) for e, p in zip(engines, paths, strict=True)
    ]
    async with TokenClient(paths[0], paths[1:]) as client:
        for engine in engines:
            await engine.expect(Hello)
        yield client, *engines
    for server in servers:
        server.close()


Scenario = Callable[[TokenClient, Engine, Engine], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    async def run(scenario: Scenario) -> None:
        async with connected(tmp_path) as (client, first, second):
            await asyncio.wait_for(scenario(client, first, second), 30)
            assert (client.num_running, client.num_waiting) == (0, 0)

    return lambda scenario: asyncio.run(run(scenario))


async def collect(client: TokenClient) -> list[int]:
    return [t async for batch in client.generate([1, 2], SamplingParams()) for t in batch.token_ids]


def test_tokens_of_two_workers_come_in_order(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        task = asyncio.create_task(collect(client))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        assert submitted.prompt_ids == (1, 2)
        name = submitted.request_id
        second.say(tokens(name, 3, 13, end=True), tokens(name, 1, 11, 12))
        await asyncio.sleep(0)
        first.say(tokens(name, 0, 10))
        assert await task == [10, 11, 12, 13]
        assert first.received.empty()
        assert second.received.empty()

    play(scenario)


def test_a_request_waits_until_its_first_token_and_keeps_its_arrival(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        stream = client.generate([1], SamplingParams(), arrived_ns=77)
        reading = asyncio.ensure_future(anext(stream))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        assert submitted.arrived_ns == 77
        assert (client.num_running, client.num_waiting) == (0, 1)
        first.say(tokens(submitted.request_id, 0, 5))
        await reading
        assert (client.num_running, client.num_waiting) == (1, 0)
        await stream.aclose()

    play(scenario)


def test_a_failure_is_raised_and_aborts_on_every_worker(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        task = asyncio.create_task(collect(client))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        first.say(Failed(submitted.request_id, "lost", "on its way", "p"))
        with pytest.raises(RequestFailed, match="on its way") as failed:
            await task
        assert failed.value.failure.code == "lost"
        for engine in (first, second):
            assert await engine.expect(Abort) == Abort(submitted.request_id)

    play(scenario)


def test_a_cancelled_task_aborts_on_every_worker(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        task = asyncio.create_task(collect(client))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        task.cancel()
        for engine in (first, second):
            assert await engine.expect(Abort) == Abort(submitted.request_id)
        with pytest.raises(asyncio.CancelledError):
            await task

    play(scenario)


@pytest.mark.parametrize("how", ["hang up", "nonsense"])
def test_a_lost_connection_ends_all_and_refuses_more(play: Callable[[Scenario], None], how: str) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        tasks = [asyncio.create_task(collect(client)) for _ in range(3)]
        for _ in tasks:
            await first.expect(Submit)
        if how == "hang up":
            second.hang_up()
        else:
            second.write(b"\0\0\0\1\xc1")
        for task in tasks:
            with pytest.raises(RequestFailed, match=r"connection to b\.sock is gone"):
                await task
        with pytest.raises(RequestFailed) as refused:
            await collect(client)
        assert refused.value.failure.code == "lost"
        for _ in tasks:
            await first.expect(Abort)

    play(scenario)


def test_a_second_connection_that_fails_closes_the_first(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine()
        server = await asyncio.start_unix_server(engine.converse, str(tmp_path / "a.sock"))
        with pytest.raises(FileNotFoundError):
            async with TokenClient(tmp_path / "a.sock", [tmp_path / "none.sock"]):
                pass
        await engine.expect(Hello)
        await asyncio.wait_for(engine.gone.wait(), 10)
        server.close()
        # What is left belongs to the server's end of the connection, which has gone.
        assert [t for t in asyncio.all_tasks() if "_receive" in repr(t.get_coro())] == []

    asyncio.run(main())


def test_tokens_of_nobody_are_passed_over(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        task = asyncio.create_task(collect(client))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        first.say(tokens("gw-other/0", 0, 1), tokens(submitted.request_id, 0, 7, end=True))
        assert await task == [7]

    play(scenario)


def test_requests_carry_the_client_s_name_and_their_own(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        tasks = [asyncio.create_task(collect(client)) for _ in range(3)]
        names: list[str] = []
        for _ in tasks:
            submitted = await first.expect(Submit)
            assert isinstance(submitted, Submit)
            names.append(submitted.request_id)
            first.say(tokens(submitted.request_id, 0, 1, end=True))
        await asyncio.gather(*tasks)
        assert len(set(names)) == 3
        assert len({name.partition("/")[0] for name in names}) == 1

    play(scenario)


def test_outputs_of_one_request_are_each_in_order_and_end_apart(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        stream = client.generate([1], SamplingParams(), choices=3)
        reading = asyncio.ensure_future(anext(stream))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        assert submitted.choices == 3
        name = submitted.request_id
        assert (client.num_running, client.num_waiting) == (0, 3)
        second.say(replace(tokens(name, 1, 21, end=True), choice=2), replace(tokens(name, 1, 11), choice=1))
        first.say(*(replace(tokens(name, 0, 10 * choice), choice=choice) for choice in range(3)))
        seen = [await reading, *[await anext(stream) for _ in range(4)]]
        found = {choice: [t for b in seen if b.choice == choice for t in b.token_ids] for choice in range(3)}
        assert found == {0: [0], 1: [10, 11], 2: [20, 21]}
        assert (client.num_running, client.num_waiting) == (2, 0)
        client.give_up(next(batch for batch in seen if batch.choice == 1))
        for engine in (first, second):
            assert await engine.expect(Abort) == Abort(name, 1)
        second.say(replace(tokens(name, 2, 12), choice=1), tokens(name, 1, 1, end=True))
        assert [batch async for batch in stream] == [tokens(name, 1, 1, end=True)]
        assert first.received.empty()

    play(scenario)


def test_giving_up_the_last_output_ends_the_request(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: TokenClient, first: Engine, second: Engine) -> None:
        stream = client.generate([1], SamplingParams())
        reading = asyncio.ensure_future(anext(stream))
        submitted = await first.expect(Submit)
        assert isinstance(submitted, Submit)
        first.say(tokens(submitted.request_id, 0, 5))
        client.give_up(await reading)
        assert [batch async for batch in stream] == []
        for engine in (first, second):
            assert await engine.expect(Abort) == Abort(submitted.request_id)

    play(scenario)
