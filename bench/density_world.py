"""What the sandboxes of `bench.sandbox_density` are connected to: a gateway that greets, in a network
namespace of its own."""

import os
import socket
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sandbox import Sandbox
from sandbox.egress import namespaces
from sandbox.egress.service import Egress

__all__ = ["AS_IT_SHOULD", "Egress", "gateway", "reach"]

HOST, OTHER, PORT = "198.51.100.7", "198.51.100.8", 8000
GREETING = b"gateway\n"
AS_IT_SHOULD = "reached, another address refused"
# By the shell itself, so that it measures nothing but the network.
_REACH = "exec 3<>/dev/tcp/{host}/{port} && read -r -t 5 line <&3 && echo $line"


@contextmanager
def gateway(state_dir: Path) -> Generator[tuple[Egress, str]]:
    """Yields what connects sandboxes to it, and its address as preset `agent` takes it."""
    with ExitStack() as last:
        namespace = namespaces.new_namespace()
        last.callback(os.close, namespace)
        addresses = [f"address add {each}/32 dev lo" for each in (HOST, OTHER)]
        namespaces.configure(namespace, ["link set lo up", *addresses])
        server = namespaces.run_in(namespace, lambda: socket.create_server(("", PORT), backlog=256))
        thread = threading.Thread(target=_greet, args=(server,), name="gateway", daemon=True)
        thread.start()
        last.callback(thread.join)
        last.callback(server.shutdown, socket.SHUT_RDWR)  # upon which it stops to accept
        egress = Egress(state_dir, uplink=Path(f"/proc/self/fd/{namespace}"), nameserver=None)
        last.callback(egress.close)
        yield egress, f"{HOST}:{PORT}"


def reach(box: Sandbox, address: str) -> str:
    """AS_IT_SHOULD, or what was otherwise."""
    host, _, port = address.rpartition(":")
    there = box.commands.run(_REACH.format(host=host, port=port))
    if there.stdout_bytes != GREETING:
        return f"not reached: {there.stderr.strip()}"
    elsewhere = box.commands.run(_REACH.format(host=OTHER, port=port))
    return AS_IT_SHOULD if not elsewhere.ok and elsewhere.denials else "another address was not refused"


def _greet(server: socket.socket) -> None:
    with server:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(GREETING)
