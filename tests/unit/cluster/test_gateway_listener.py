"""The gateway's listening socket: replies leave at once, and a taken port is said before anything starts."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from cluster.config import DockyardConfig
from cluster.server import _listening, _threads
from cluster.state import DeploymentRecord, StateFolder, started_at
from gateway.config import GatewayConfig
from protocol.errors import ResourceShortage


def config(port: int) -> DockyardConfig:
    return DockyardConfig(gateway=GatewayConfig(port=port))


def test_small_writes_of_a_reply_do_not_wait_for_each_other():
    async def nodelay_of_a_connection() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            await writer.wait_closed()

        with _listening(config(0)) as listener:
            address = listener.getsockname()
            async with await asyncio.start_server(serve, sock=listener):
                _, writer = await asyncio.open_connection(*address)
                nodelay = await found
                writer.close()
                await writer.wait_closed()
        return nodelay

    assert asyncio.run(nodelay_of_a_connection()) != 0


def test_of_two_servers_that_bind_a_port_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Linux lets both bind, and tells the second one to listen."""
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))

        class Second(socket.socket):
            def bind(self, address: tuple[str, int]) -> None:
                super().bind(address)
                first.listen()

        monkeypatch.setattr(socket, "socket", Second)
        port = first.getsockname()[1]
        with pytest.raises(ResourceShortage, match=str(port)), _listening(config(port)):
            pass


def test_a_taken_port_is_named():
    with _listening(config(0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ResourceShortage, match=str(port)), _listening(config(port)):
            pass


def test_a_port_that_an_own_deployment_has_is_said_so(tmp_path: Path):
    state, pid = StateFolder(tmp_path), os.getpid()
    with _listening(config(0)) as first:
        port = first.getsockname()[1]
        record = DeploymentRecord(
            id="dep-1", pid=pid, started_at=started_at(pid), scratch="", model="nano", ready=True,
            url=f"http://127.0.0.1:{port}",
        )  # fmt: skip
        state.write(record)
        said = r"dep-1.*which serves nano"
        with pytest.raises(ResourceShortage, match=said) as taken, _listening(config(port), state):
            pass
        assert "dockyard down" in taken.value.hint
        state.forget(record.id)
        with pytest.raises(ResourceShortage) as taken, _listening(config(port), state):
            pass
        assert "dockyard down" not in taken.value.hint


def test_a_gateway_that_would_lack_threads_does_not_begin(shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceShortage, match="no threads for the gateway"):
        _threads()
    shortage.undo()
    _threads().shutdown()
