"""The engine's end of the token sockets: its thread and its loop are there from `start` to `stop` only."""

import gc
import threading
from pathlib import Path

import pytest

from actors.engine_worker import EngineWorker
from actors.token_server import TokenServer
from engine.config import EngineConfig
from protocol.errors import DockyardError, ResourceShortage
from protocol.wire import Failed


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


def test_an_engine_that_cannot_be_built_leaves_no_loop_open(tmp_path: Path) -> None:
    with pytest.raises(DockyardError):
        EngineWorker(EngineConfig(model=str(tmp_path / "none.gguf")), tmp_path / "a.sock")
    gc.collect()  # an open loop would warn here, which is an error
