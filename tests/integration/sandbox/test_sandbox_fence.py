"""The fence at the host end of a veth: what it lets pass, whoever sends it."""

import json
import os
import socket
import struct
import subprocess
import threading
from contextlib import contextmanager

import pytest
from sandbox_internet import (
    DATAGRAMS,
    HOST,
    HOST_6,
    OTHER,
    UDP_PORT,
    attempt,
    wait_until,
)

from sandbox.egress import links
from sandbox.journal import Journal
from sandbox.policy import presets


def test_sandboxes_do_not_reach_each_other(connect, state_dir):
    """Their uplink routes between them, and one of them serves."""
    server, client = (connect(policy=presets.open_internet()) for _ in range(2))
    serve = "import socket; s = socket.create_server(('0.0.0.0', 8000)); print('up', flush=True); s.accept()"
    up = threading.Event()
    serving = server.commands.start(["python3", "-c", serve], on_stdout=lambda text: up.set())
    assert up.wait(30)
    with namespace_of(state_dir, server) as namespace:
        address = own_address(namespace)
        assert links.run_in(namespace, lambda: reach(address, 8000)) == "reached"
    ended, denials = attempt(client, f"tcp('{address}', 8000)", f"udp('{address}', 8000)")
    assert ended == ["EPERM"] * 2
    assert {each.address for each in denials} == {address}
    # From its own namespace, where no hook of a cgroup is: the fence alone.
    with namespace_of(state_dir, client) as namespace:
        assert links.run_in(namespace, lambda: reach(address, 8000)) == "late"
        assert links.run_in(namespace, lambda: reach(HOST, 80)) == "reached"
    assert any("packets to" in each.detail and each.address == address for each in client.denials)
    serving.kill()


def test_packets_of_any_socket_meet_the_fence(connect, internet, state_dir):
    """Raw frames of the host's root in the sandbox's namespace: allowed ones pass, spoofed and other ones and
    what is no IP do not."""
    box = connect(DATAGRAMS)
    with namespace_of(state_dir, box) as namespace:
        own = own_address(namespace)
        frames = [
            a_frame(own, HOST, UDP_PORT, b"allowed"),
            a_frame(own, HOST, UDP_PORT + 1, b"port"),
            a_frame(own, OTHER, UDP_PORT, b"host"),
            a_frame(OTHER, HOST, UDP_PORT, b"spoofed"),
            a_frame(own, HOST, UDP_PORT, b"other", ethertype=0x0806),
            a_frame(own, HOST, UDP_PORT, b"last"),
        ]
        links.run_in(namespace, lambda: send_frames(frames))
    wait_until(lambda: b"last" in internet.heard)
    assert internet.heard == [b"allowed", b"last"]
    assert {(each.address, each.port) for each in box.denials} >= {(HOST, UDP_PORT + 1), (OTHER, UDP_PORT)}


@pytest.mark.parametrize(("host", "odd"), [(HOST, 2953), (HOST_6, 2889)])
def test_datagrams_of_several_packets_pass_where_their_first_does(connect, host, odd):
    """Of the odd size the last packet holds one byte, less than a port."""
    script = f"""
import socket
family = socket.AF_INET6 if ":" in "{host}" else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as one:
    one.settimeout(5)
    for size in (3000, {odd}, 8):
        one.sendto(bytes(size), ("{host}", {UDP_PORT}))
        print(len(one.recv(4000)))
"""
    box = connect(DATAGRAMS, {**DATAGRAMS, "to": HOST_6})
    result = box.commands.run(["python3", "-c", script])
    assert result.stdout.split() == ["3000", str(odd), "8"], result.stderr
    assert box.denials == ()
    refused = connect({**DATAGRAMS, "ports": [1]}, {**DATAGRAMS, "to": HOST_6, "ports": [1]})
    assert not refused.commands.run(["python3", "-c", script]).ok


def test_packets_with_options_of_ip_do_not_pass(connect):
    """Source routes among them."""
    script = f"""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.settimeout(0.5)
    route = bytes([131, 7, 4]) + socket.inet_aton("{HOST}") + bytes(1)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, route)
    one.sendto(b"datagram", ("{HOST}", {UDP_PORT}))
    one.recv(8)
"""
    result = connect(DATAGRAMS).commands.run(["python3", "-c", script])
    assert "Error" in result.stderr, "none of a refused option, a refused send and an answer that never comes"


@contextmanager
def namespace_of(state_dir, box):
    """The sandbox's, for the host's root."""
    (record,) = [each for each in Journal(state_dir).records() if each.id == box.id]
    fd = os.open(f"/proc/{record.processes[1].pid}/ns/net", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def own_address(namespace):
    """Version 4."""
    done = links.run_in(namespace, lambda: subprocess.check_output(["ip", "-4", "-json", "address"]))
    return next(each["addr_info"][0]["local"] for each in json.loads(done) if each["ifname"] == "eth0")


def reach(address, port):
    """From the calling thread's namespace, as the host's root outside of every cgroup of ours."""
    with socket.socket() as one:
        one.settimeout(1)
        try:
            one.connect((address, port))
        except TimeoutError:
            return "late"
    return "reached"


def a_frame(source, to, port, data, ethertype=0x0800):
    udp = struct.pack(">HHHH", 4000, port, 8 + len(data), 0) + data
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0)
    addresses = socket.inet_aton(source) + socket.inet_aton(to)
    total = sum(struct.unpack(">10H", head + addresses))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    head = head[:10] + struct.pack(">H", checksum)
    macs = bytes.fromhex("02646b790001") + bytes.fromhex("02646b790002")
    return macs + struct.pack(">H", ethertype) + head + addresses + udp


def send_frames(frames):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as one:
        one.bind(("eth0", 0))
        for frame in frames:
            one.send(frame)
