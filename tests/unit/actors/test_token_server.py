"""The engine's end of the token sockets: its thread and its loop are there from `start` to `stop` only."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from actors.engine_worker import EngineWorker
from actors.frames import pack_to_engine, read_from_engine
from actors.token_client import TokenClient
from actors.token_server import TokenServer
from engine.config import EngineConfig
from protocol.errors import DockyardError, ResourceShortage
from protocol.wire import Abort, Failed, FromEngine, Hello


def server(path: Path) -> TokenServer:
    return TokenServer(path, lambda message: None, lambda client: None)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "token-server"]


def test_one_that_was_never_started_stops_and_sends_nothing(tmp_path: Path) -> None:
    it = server(tmp_path / "a.sock")
    it.send([Failed("gw-1/0", "lost", "nobody reads it")])
    it.stop()
    it.stop()


def test_stop_ends_the_thread_and_may_be_repeated(tmp_path: Path) -> None:
    it = server(tmp_path / "a.sock")
    it.start()
    assert threads() == ["token-server"]
    it.stop()
    it.stop()
    it.send([Failed("gw-1/0", "lost", "nobody reads it")])
    assert threads() == []
    assert not (tmp_path / "a.sock").exists()


def test_one_that_cannot_start_may_be_stopped(tmp_path: Path) -> None:
    it = server(tmp_path / "no folder" / "a.sock")
    with pytest.raises(ResourceShortage):
        it.start()
    it.stop()


def test_one_that_has_no_thread_may_be_started_later(tmp_path: Path, shortage: pytest.MonkeyPatch) -> None:
    it = server(tmp_path / "a.sock")
    with pytest.raises(ResourceShortage, match="there is no thread"):
        it.start()
    it.stop()
    gc.collect()  # an open loop would warn here, which is an error
    shortage.undo()
    it.start()
    it.stop()
    assert threads() == []


def test_an_engine_without_a_thread_is_a_shortage(tmp_path: Path, shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceShortage, match="there is no thread for the engine"):
        EngineWorker(EngineConfig(model=str(tmp_path / "none.gguf")), tmp_path / "a.sock")
    gc.collect()


def test_an_engine_that_cannot_be_built_leaves_no_loop_open(tmp_path: Path) -> None:
    with pytest.raises(DockyardError):
        EngineWorker(EngineConfig(model=str(tmp_path / "none.gguf")), tmp_path / "a.sock")
    gc.collect()  # an open loop would warn here, which is an error


def test_a_step_of_more_than_a_frame_reaches_a_client_that_reads_whole(tmp_path: Path) -> None:
    step = [Failed(f"gw-1/{n}", "lost", "x" * (3 << 20)) for n in range(11)]
    known = threading.Event()
    it = TokenServer(tmp_path / "a.sock", lambda message: known.set(), lambda client: None)
    it.start()

    async def receive() -> list[FromEngine]:  # and the greeting, which is empty
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "a.sock"))
        writer.write(pack_to_engine(Hello("gw-1")) + pack_to_engine(Abort("gw-1/99")))
        await asyncio.to_thread(known.wait, 10)
        it.send(step)
        found: list[FromEngine] = []
        while len(found) < len(step):
            found += await asyncio.wait_for(read_from_engine(reader), 10)
        writer.close()
        return found

    assert asyncio.run(receive()) == step
    it.stop()


def test_a_client_that_is_connected_is_known(tmp_path: Path) -> None:
    """However busy the server's thread is: what is sent to a client that it does not know is lost."""
    it = server(tmp_path / "a.sock")
    it.start()
    busy, go = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        go.wait(10)

    async def connect() -> bool:
        assert it._loop is not None
        it._loop.call_soon_threadsafe(block)
        assert await asyncio.to_thread(busy.wait, 10)
        asyncio.get_running_loop().call_later(0.1, go.set)
        async with TokenClient(tmp_path / "a.sock") as client:
            return client._client in it._clients

    assert asyncio.run(connect())
    it.stop()
