"""A gateway of this process, which has no thread more from the moment that it listens: it answers, is told to
end, and says so at its end. A program: WAY FOLDER."""

import os
import queue
import signal
import sys
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from thread_shortage import Way, run_short

import cluster.server
from actors.token_server import TokenServer
from cluster.config import DockyardConfig
from cluster.lifeline import Stopped, signals_held
from gateway.config import GatewayConfig

urls = queue.SimpleQueue[str]()


def main(way: Way, folder: Path) -> None:
    patches = pytest.MonkeyPatch()
    patches.setattr(cluster.server, "deployed", deployed)
    config = DockyardConfig(state_dir=folder, gateway=GatewayConfig(port=0))

    def listens(url: str, _: object) -> None:
        run_short(patches, way)
        urls.put(url)

    with signals_held():
        threading.Thread(target=ask, daemon=True).start()
        try:
            cluster.server.serve(config, listens, lambda _: None)
        except Stopped as stopped:
            print(stopped)


@contextmanager
def deployed(config: DockyardConfig, *_: object) -> Generator[SimpleNamespace]:
    """One worker's socket, without its engine."""
    path = config.state_dir / "a.sock"
    worker = SimpleNamespace(socket_path=path)
    tokens = TokenServer(path, lambda message: None, lambda client: None)
    tokens.start()
    try:
        yield SimpleNamespace(
            id="dy-1", model=SimpleNamespace(name="nano"), scratch=config.state_dir, workers=(worker,),
            entry=worker, describe=lambda: {"id": threading.current_thread().name},
        )  # fmt: skip
    finally:
        tokens.stop()


def ask() -> None:
    with urllib.request.urlopen(f"{urls.get()}/dockyard/status", timeout=20) as reply:
        print(reply.read().decode(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(cast(Way, sys.argv[1]), Path(sys.argv[2]))
