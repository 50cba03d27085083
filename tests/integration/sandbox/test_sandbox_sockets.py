"""Sockets of a sandbox: a loopback that works, and buffers that count."""

import os

import pytest

from sandbox import Sandbox

needs_cgroups = pytest.mark.skipif(os.geteuid() != 0, reason="the limit on socket memory needs root")

# Connections and datagrams that nobody reads; the bytes that the kernel took, and that it still held.
FLOOD_TCP = """
import resource, socket
server, kept, taken = socket.create_server(("127.0.0.1", 0), backlog=100), [], 0
for _ in range(250):
    client = socket.create_connection(server.getsockname())
    for end in (client, server.accept()[0]):
        end.setblocking(False)
        kept.append(end)
        try:
            while True:
                taken += end.send(bytes(65536))
        except OSError:
            pass
print(taken)
"""
FLOOD_UDP = """
import socket
pairs, held = [], 0
for _ in range(250):
    reader, writer = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    reader.bind(("127.0.0.1", 0))
    pairs.append((reader, writer))
    for _ in range(50):
        try:
            writer.sendto(bytes(60000), reader.getsockname())
        except OSError:
            break
for reader, _ in pairs:
    reader.setblocking(False)
    try:
        while True:
            held += len(reader.recv(65536))
    except OSError:
        pass
print(held)
"""
ECHO = """
import socket, threading
for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
    server = socket.create_server((host, 0), family=family)
    def serve():
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as stream:
            stream.write(stream.read(3_000_000))
    thread = threading.Thread(target=serve)
    thread.start()
    with socket.create_connection(server.getsockname()[:2]) as client:
        feeder = threading.Thread(target=client.sendall, args=(b"x" * 3_000_000,))
        feeder.start()
        print(len(client.makefile("rb").read(3_000_000)))
        feeder.join()
    thread.join()
"""


@needs_cgroups
@pytest.mark.parametrize("flood", [FLOOD_TCP, FLOOD_UDP], ids=["tcp", "udp"])
def test_what_nobody_reads_stays_below_the_memory_limit(create, substrate: str, flood: str):
    box = create(substrate=substrate, memory_mb=64)
    result = box.commands.run(["python3", "-c", flood], timeout_s=300)
    assert result.reason in ("exit", "oom")
    assert int(result.stdout or 0) < 64 << 20, result.stderr
    assert box.commands.run("echo alive").stdout == "alive\n"


def test_receive_buffers_keep_their_size(box: Sandbox):
    script = (
        "import socket; s = socket.socket(); size = lambda: s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)"
    )
    change = (
        "before = size(); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22); print(before == size())"
    )
    assert box.commands.run(["python3", "-c", f"{script}\n{change}"]).stdout == "True\n"


def test_servers_and_clients_meet_on_the_loopback(box: Sandbox):
    result = box.commands.run(["python3", "-c", ECHO])
    assert (result.stdout, result.stderr) == ("3000000\n3000000\n", "")


def test_buffers_of_a_connection_are_small(box: Sandbox):
    for name in ("tcp_rmem", "tcp_wmem"):
        assert box.commands.run(f"cat /proc/sys/net/ipv4/{name}").stdout.split()[-1] == "65536"
