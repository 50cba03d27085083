"""The fence at the host end of a veth: what it lets pass, whoever sends it."""

import errno
import json
import os
import socket
import struct
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from sandbox_internet import (
    DATAGRAMS,
    HOST,
    HOST_6,
    NAMESERVER,
    OTHER,
    UDP_PORT,
    attempt,
    wait_until,
)

from sandbox import cgroups
from sandbox.egress import namespaces
from sandbox.egress.fence import Fence
from sandbox.egress.libbpf import BpfMap
from sandbox.egress.rules import compile_table, rules_of
from sandbox.egress.service import Egress
from sandbox.journal import Journal
from sandbox.policy import Network, presets


def test_sandboxes_do_not_reach_each_other(connect, state_dir):
    """Their uplink routes between them, and one of them serves."""
    server, client = (connect(policy=presets.open_internet()) for _ in range(2))
    serve = "import socket; both = {'family': socket.AF_INET6, 'dualstack_ipv6': True}"
    serve += "; s = socket.create_server(('::', 8000), **both)"
    serve += "; print('up', flush=True); [s.accept() for _ in range(9)]"
    up = threading.Event()
    serving = server.commands.start(["python3", "-c", serve], on_stdout=lambda text: up.set())
    assert up.wait(30)
    with namespace_of(state_dir, server) as namespace:
        address, sixth = own_addresses(namespace)
        assert namespaces.run_in(namespace, lambda: reach(address, 8000)) == "reached"
        assert namespaces.run_in(namespace, lambda: reach(sixth, 8000)) == "reached"
    calls = [f"{how}('{each}', 8000)" for each in (address, sixth) for how in ("tcp", "udp")]
    ended, denials = attempt(client, *calls)
    assert ended == ["EPERM"] * 4
    assert {each.address for each in denials} == {address, sixth}
    # From its own namespace, where no hook of a cgroup is: the fence alone.
    with namespace_of(state_dir, client) as namespace:
        assert namespaces.run_in(namespace, lambda: reach(address, 8000)) == "late"
        assert namespaces.run_in(namespace, lambda: reach(sixth, 8000)) == "late"
        assert namespaces.run_in(namespace, lambda: reach(HOST, 80)) == "reached"
        assert namespaces.run_in(namespace, lambda: reach(HOST_6, 80)) == "reached"
    stopped = {each.address for each in client.denials if "packets to" in each.detail}
    assert stopped >= {address, sixth}
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
        namespaces.run_in(namespace, lambda: send_frames(frames))
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


def test_a_machine_that_checks_where_packets_come_from_lets_them_pass(connect, internet):
    """A strict reverse path filter: what comes in has to come from where its answer goes."""
    strict = Path("/proc/sys/net/ipv4/conf/all/rp_filter")
    namespaces.run_in(internet.namespace, lambda: strict.write_text("1"))
    try:
        box = connect({"to": HOST, "ports": [80]}, {"to": HOST_6, "ports": [80]}, DATAGRAMS)
        calls = (f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)", f"udp('{HOST}', {UDP_PORT})")
        assert attempt(box, *calls)[0] == ["hello", "hello", "datagram"]
    finally:
        namespaces.run_in(internet.namespace, lambda: strict.write_text("0"))


def test_who_gets_an_address_again_has_it_alone(create, internet, state_dir):
    """And until somebody has it, what is sent there arrives nowhere."""
    egress = Egress(state_dir, uplink=internet.path, nameserver=NAMESERVER, num_spare=0)
    own: set[tuple[str, str]] = set()
    try:
        for _ in range(2):
            with (
                create(policy=presets.open_internet(), egress=egress) as box,
                namespace_of(state_dir, box) as namespace,
            ):
                addresses = own_addresses(namespace)
                own.add(addresses)
                assert all(answers(internet, each) for each in addresses)
                calls = (f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)")
                assert attempt(box, *calls)[0] == ["hello", "hello"]
            assert not any(answers(internet, each) for each in addresses)
            egress._trunk._free.rotate(1)  # the one that came back last is the next
    finally:
        egress.close()
    assert len(own) == 1


def test_a_sandbox_without_memory_for_the_word_that_shuts_it_has_no_way_out(connect, egress, monkeypatch):
    """And the others are shut as they should."""
    boxes = [connect({"to": HOST, "ports": [80]}) for _ in range(2)]
    assert all(attempt(box, f"tcp('{HOST}', 80)")[0] == ["hello"] for box in boxes)
    key = struct.pack("=I", boxes[0]._ownership.connection.link.ifindex)
    write = BpfMap.set

    def refuse(self, where, value):
        if where == key:
            raise OSError(errno.ENOMEM, "no memory for an entry")
        write(self, where, value)

    monkeypatch.setattr(BpfMap, "set", refuse)
    egress.fence.shut()
    monkeypatch.undo()
    assert attempt(boxes[0], f"tcp('{HOST}', 80)")[0] == ["late"]
    assert attempt(boxes[1], f"tcp('{HOST}', 80)")[0] == ["EPERM"]


def test_what_cannot_be_shut_any_more_since_it_has_gone_keeps_nobody_else_open(host_groups):
    gone, open_still = host_groups
    fence = Fence((), lambda sandbox, attempt: None)
    try:
        network = Network.model_validate({"destinations": [{"to": HOST, "ports": [80]}]})
        table = compile_table(rules_of(network))
        sandboxes = [fence.guard(each) for each in (gone, open_still)]
        for each in sandboxes:
            fence.replace(each, table)
        gone.rmdir()
        fence.shut()
        with pytest.raises(OSError, match="the fence is shut"):
            fence.replace(sandboxes[1], table)
        identity = fence._maps["attached"].get(struct.pack("=Q", sandboxes[1]), 16)
        assert identity == struct.pack("=QII", sandboxes[1], 0, 0)
    finally:
        fence.close()


@pytest.fixture
def host_groups(tmp_path):
    """Two fresh groups of version 2."""
    root = next(each.root for each in cgroups.find_hierarchies() if each.version == 2)
    key = cgroups.state_key(tmp_path)
    groups = [root / cgroups.TOP / key / name for name in ("one", "two")]
    for each in groups:
        each.mkdir(parents=True)
    yield groups
    for each in groups:
        if each.exists():
            cgroups.remove_group(each)
    cgroups.remove_empty_parents([root], key)


def answers(internet, address):
    """Whether the machine at that address refuses a connection, as one that is there does."""

    def ask():
        own = HOST_6 if ":" in address else HOST
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.settimeout(0.5)
            one.bind((own, 0))  # where its policy lets answers go
            return one.connect_ex((address, 9)) == errno.ECONNREFUSED

    return namespaces.run_in(internet.namespace, ask)


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
    return own_addresses(namespace)[0]


def own_addresses(namespace):
    """Version 4 and 6."""
    done = namespaces.run_in(namespace, lambda: subprocess.check_output(["ip", "-json", "address"]))
    (eth0,) = (each["addr_info"] for each in json.loads(done) if each["ifname"] == "eth0")
    return tuple(each["local"] for each in sorted(eth0, key=lambda each: each["family"]))


def reach(address, port):
    """From the calling thread's namespace, as the host's root outside of every cgroup of ours."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
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
