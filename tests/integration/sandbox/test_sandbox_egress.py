"""What a networked sandbox reaches: what its policy says, by every kind of socket, and nothing else."""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from sandbox_internet import HOST, HOST_6, METADATA, NAT64_HOST, OTHER, PRIVATE, UDP_PORT

from sandbox import AsyncSandbox, Policy, cgroups
from sandbox.audit import Leftover, check_integrity, sweep
from sandbox.egress import links, service
from sandbox.egress.service import Egress
from sandbox.errors import InvalidArgument, SandboxGone, StartError, UnsupportedError, VersionConflict
from sandbox.journal import Journal
from sandbox.policy import Network, presets
from sandbox.processes import ProcessKey, find_process

WEB = {"to": HOST, "ports": [80]}
WEB_6 = {"to": "2001:db8::/32", "ports": [80]}
DATAGRAMS = {"to": HOST, "ports": [UDP_PORT], "protocol": "udp"}
EVERY_SERVER = {"to": "198.51.100.0/24", "ports": ["1-65535"]}

# Each line: how, where, and then the greeting or echo, or the error's name.
REACH = """
import errno, socket, struct, sys
def tcp(host, port, how="connect"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = 262 if how == "mptcp" else 0
    with socket.socket(family, socket.SOCK_STREAM, kind) as one:
        one.settimeout(5)
        if how == "fastopen":
            one.settimeout(None)
            one.sendto(b"x", 0x20000000, (host, port))
        else:
            one.connect((host, port))
        return one.recv(5).decode()
def udp(host, port, how="send"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.settimeout(5)
        if how == "connect":
            one.connect((host, port)); one.send(b"datagram")
        else:
            one.sendto(b"datagram", (host, port))
        return one.recv(9).decode()
def make(family, kind, protocol):
    with socket.socket(family, kind, protocol):
        return "made"
def bind(host, port):
    with socket.socket() as one:
        one.bind((host, port))
        return "bound"
for line in sys.argv[1:]:
    try:
        print(eval(line))
    except OSError as error:
        print("late" if isinstance(error, TimeoutError) else errno.errorcode[error.errno])
"""


def attempt(box, *calls):
    """What each of these calls of REACH ended with, and the command's denials."""
    result = box.commands.run(["python3", "-c", REACH, *calls], timeout_s=60)
    assert result.ok, result.stderr
    return result.stdout.split(), result.denials


def test_what_is_allowed_is_reached_in_every_form(connect, substrate):
    box = connect(WEB, WEB_6, DATAGRAMS, substrate=substrate)
    calls = (
        f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)", f"tcp('::ffff:{HOST}', 80)", f"tcp('{NAT64_HOST}', 80)",
        f"tcp('{HOST}', 80, 'fastopen')", f"udp('{HOST}', {UDP_PORT})",
        f"udp('{HOST}', {UDP_PORT}, 'connect')", f"udp('::ffff:{HOST}', {UDP_PORT})",
    )  # fmt: skip
    assert attempt(box, *calls) == (["hello"] * 5 + ["datagram"] * 3, ())
    assert box.denials == ()


def test_groups_that_a_runtime_makes_below_ours_are_guarded_too(connect):
    box = connect(WEB, substrate="container", runtime="runc")
    assert attempt(box, f"tcp('{HOST}', 80)", f"tcp('{HOST}', 81)")[0] == ["hello", "EPERM"]


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (f"tcp('{HOST}', 81)", (HOST, 81, "tcp")),
        (f"tcp('{OTHER}', 80)", (OTHER, 80, "tcp")),
        (f"tcp('::ffff:{OTHER}', 80)", (OTHER, 80, "tcp")),
        ("tcp('64:ff9b::198.51.100.8', 80)", (OTHER, 80, "tcp")),
        (f"tcp('{NAT64_HOST}', 81)", (HOST, 81, "tcp")),
        (f"tcp('{HOST_6}', 81)", (HOST_6, 81, "tcp")),
        (f"tcp('{OTHER}', 80, 'fastopen')", (OTHER, 80, "tcp")),
        (f"udp('{HOST}', 80)", (HOST, 80, "udp")),
        (f"udp('{HOST}', 80, 'connect')", (HOST, 80, "udp")),
        (f"udp('{HOST_6}', {UDP_PORT})", (HOST_6, UDP_PORT, "udp")),
        (f"udp('::ffff:{OTHER}', {UDP_PORT})", (OTHER, UDP_PORT, "udp")),
        ("tcp('198.51.100.53', 53)", ("198.51.100.53", 53, "tcp")),
        ("udp('198.51.100.53', 53)", ("198.51.100.53", 53, "udp")),
        (f"bind('{OTHER}', 8000)", (OTHER, 8000, "tcp")),
    ],
)
def test_what_is_not_is_refused_and_named(connect, call, where):
    ended, denials = attempt(connect(WEB, WEB_6, DATAGRAMS), call)
    assert ended == ["EPERM"]
    assert [(each.address, each.port, each.protocol) for each in denials] == [where]
    assert [(each.limit, each.count) for each in denials] == [("network", 1)]


@pytest.mark.parametrize(
    ("call", "protocol"),
    [
        ("make(socket.AF_INET, socket.SOCK_RAW, 1)", "icmp"),
        ("make(socket.AF_INET6, socket.SOCK_RAW, 58)", "icmp6"),
        ("make(socket.AF_INET, socket.SOCK_DGRAM, 1)", "icmp"),
        (f"tcp('{HOST}', 80, 'mptcp')", "6"),
        ("make(socket.AF_PACKET, socket.SOCK_RAW, 0)", ""),
    ],
    ids=["raw", "raw6", "ping", "mptcp", "packet"],
)
def test_sockets_are_tcp_and_udp(connect, substrate, call, protocol):
    """By the filter of calls, by the kernel's own rule, or by ours: none is made."""
    (ended,), _ = attempt(connect(EVERY_SERVER, substrate=substrate), call)
    assert ended in ("EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT"), protocol


@pytest.mark.parametrize("substrate", ["function", "container"])
def test_no_policy_opens_metadata_private_ranges_or_the_control_plane(connect, substrate):
    """The servers are there: only the policy stands between."""
    box = connect(policy=presets.open_internet(), substrate=substrate)
    calls = [f"tcp('{host}', 80)" for host in (METADATA, f"::ffff:{METADATA}", PRIVATE, f"::ffff:{PRIVATE}")]
    ended, denials = attempt(
        box, *calls, f"tcp('{HOST}', 6379)", f"tcp('{HOST}', 80)", f"tcp('{HOST_6}', 80)"
    )
    assert ended == ["EPERM"] * 5 + ["hello"] * 2
    assert {(each.address, each.port) for each in denials} == {(METADATA, 80), (PRIVATE, 80), (HOST, 6379)}


def test_what_is_written_opens_private_ranges_and_nothing_else_does(connect):
    box = connect(
        {"to": PRIVATE, "ports": [80]}, {"to": METADATA, "ports": [80]}, {"to": HOST, "ports": [6379]}
    )
    ended, _ = attempt(box, f"tcp('{PRIVATE}', 80)", f"tcp('{METADATA}', 80)", f"tcp('{HOST}', 6379)")
    assert ended == ["hello", "EPERM", "EPERM"]


def test_the_agent_preset_is_the_gateway_and_nothing_else(connect):
    box = connect(policy=presets.agent(f"{PRIVATE}:81"))
    ended, _ = attempt(box, f"tcp('{PRIVATE}', 81)", f"tcp('{PRIVATE}', 80)", f"tcp('{HOST}', 81)")
    assert ended == ["hello", "EPERM", "EPERM"]


def test_the_loopback_is_the_sandboxs_own(connect):
    script = """
import socket
with socket.create_server(("0.0.0.0", 8000)) as server:
    for host in ("127.0.0.1", "0.0.0.0", "127.1.2.3"):
        with socket.create_connection((host, 8000)):
            server.accept()[0].close()
print("met")
"""
    assert connect().commands.run(["python3", "-c", script]).stdout == "met\n"


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


def wait_until(holds, patience_s=10.0):
    give_up = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < give_up, "it never came"


def test_an_update_replaces_all_and_cuts_what_it_does_not_allow(connect, internet, substrate):
    box = connect(WEB, DATAGRAMS, substrate=substrate)
    script = f"""
import socket, sys
one, two = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.connect(("{HOST}", 80)); one.recv(5); two.connect(("{HOST}", {UDP_PORT}))
one.sendall(b"before"); print(one.recv(6).decode(), flush=True)
sys.stdin.readline()
one.settimeout(1)
one.sendall(b"after")
try: print(one.recv(5).decode())
except TimeoutError: print("late")
try: two.send(b"after")
except PermissionError: print("EPERM")
"""
    command = box.commands.start(f"mkfifo go; python3 -c '{script}' < <(cat go)")
    wait_until(lambda: b"before" in internet.heard)
    other = Network.model_validate({"destinations": [{"to": HOST, "ports": [81]}]})
    assert box.set_network(other, expected_version=1) == box.network_version == 2
    box.commands.run("echo > go")
    result = command.wait(30)
    assert (result.stdout.split(), result.stderr) == (["before", "late", "EPERM"], "")
    assert b"after" not in internet.heard
    assert any("packets to" in each.detail for each in result.denials)
    assert attempt(box, f"tcp('{HOST}', 80)", f"tcp('{HOST}', 81)")[0] == ["EPERM", "hello"]


def test_an_update_of_another_version_changes_nothing(connect):
    box = connect(WEB)
    with pytest.raises(VersionConflict, match="network version 2 was expected and 1 holds"):
        box.set_network(Network(), expected_version=2)
    assert attempt(box, f"tcp('{HOST}', 80)")[0] == ["hello"]
    assert box.set_network("none", 1) == 2
    with pytest.raises(VersionConflict):
        box.set_network(Network(), 1)
    assert attempt(box, f"tcp('{HOST}', 80)")[0] == ["EPERM"]


def test_phases_are_networks_by_name(connect):
    to_web = Network.model_validate({"destinations": [WEB]})
    box = connect(policy=Policy(phases={"install": to_web, "work": "none"}))
    call = f"tcp('{HOST}', 80)"
    assert attempt(box, call)[0] == ["EPERM"]
    assert box.enter_phase("install", 1) == 2
    assert attempt(box, call)[0] == ["hello"]
    assert box.enter_phase("work", 2) == 3
    assert attempt(box, call)[0] == ["EPERM"]
    with pytest.raises(InvalidArgument, match="phase='test' is not in the policy's phases"):
        box.enter_phase("test", 3)
    with pytest.raises(VersionConflict):
        box.enter_phase("install", 2)


def test_only_a_sandbox_that_lives_and_has_a_network_takes_a_policy(create, connect):
    with pytest.raises(UnsupportedError, match="made without a network"):
        create().set_network(Network(), 1)
    box = connect(WEB)
    box.kill()
    with pytest.raises(SandboxGone):
        box.set_network(Network(), 1)


def test_attempts_are_counted_without_end(connect):
    script = f"""
import socket
for port in range(1, 2001):
    socket.socket().connect_ex(("{OTHER}", 1 + port % 400))
"""
    denials = connect().commands.run(["python3", "-c", script], timeout_s=60).denials
    assert sum(each.count for each in denials) == 2000
    assert len(denials) <= 257


def test_a_host_without_the_programs_refuses_before_anything_is_made(create, state_dir, monkeypatch):
    for name, value in (("EGRESS_OBJECT", Path("/nowhere")), ("os", None)):
        with monkeypatch.context() as patch:
            if value is None:
                patch.setattr(service.os, "geteuid", lambda: 1000)
            else:
                patch.setattr(service, name, value)
            with pytest.raises(UnsupportedError, match=r"not built|needs root"):
                create(policy=Policy(network=Network()))
    assert Journal(state_dir).records() == []


def test_a_program_that_cannot_be_attached_refuses_the_sandbox(create, internet, state_dir):
    broken = Egress(state_dir, uplink=internet.path, num_spare=0)
    broken.close()
    with pytest.raises(StartError, match="connecting a sandbox to the network") as caught:
        create(policy=Policy(network=Network()), egress=broken)
    assert caught.value.phase == "network"
    assert internet.devices() == ["lo"]


OWNER = """
import os, sys
from pathlib import Path
from sandbox import Policy, Sandbox
from sandbox.egress.service import Egress
from sandbox.policy import Network
state, toolkit, uplink = map(Path, sys.argv[1:])
egress = Egress(state, uplink=uplink)
egress.fill()
box = Sandbox.create(policy=Policy(network=Network()), egress=egress, state_dir=state, toolkit=toolkit)
print(box.id, flush=True)
sys.stdin.read()
"""


def test_nothing_stays_of_an_owner_that_was_killed(internet, tmp_path, toolkit):
    words = [
        sys.executable,
        "-c",
        OWNER,
        str(tmp_path),
        str(toolkit),
        f"/proc/{os.getpid()}/fd/{internet.namespace}",
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith("sbx-")
        assert len(links.host_ends(internet.namespace)) == 3
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: internet.devices() == ["lo"])
    assert {each.kind for each in sweep(tmp_path)} >= {"cgroup", "record"}
    assert check_integrity(tmp_path).is_clean


def test_an_audit_finds_host_ends_whose_owner_has_gone(tmp_path, monkeypatch):
    """In a namespace of its own: an audit looks at the one that it runs in."""
    with subprocess.Popen(["true"]) as gone:
        key = find_process(gone.pid) or ProcessKey(gone.pid, 1)
    uplink = links.new_namespace()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(links, "this_process", lambda: key)
            stale = links.make_link(uplink, cgroups.state_key(tmp_path), lambda ifindex: None)
        live = links.make_link(uplink, cgroups.state_key(tmp_path), lambda ifindex: None)
        found = [Leftover("link", stale.name)]
        assert list(links.run_in(uplink, lambda: check_integrity(tmp_path)).leftovers) == found
        assert list(links.run_in(uplink, lambda: sweep(tmp_path))) == found
        assert [each.name for each in links.host_ends(uplink)] == [live.name]
        links.remove_link(uplink, live)
        stale.let_go()
    finally:
        os.close(uplink)


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


def test_asyncio_code_changes_the_policy_too(connect):
    async def change(box):
        ours = AsyncSandbox(box)
        version = await ours.set_network(Network(), ours.network_version)
        result = await ours.commands.run(["python3", "-c", REACH, f"tcp('{HOST}', 80)"])
        return version, result.stdout, result.denials == ours.denials

    assert asyncio.run(change(connect(WEB))) == (2, "EPERM\n", True)


BY_DEFAULT = """
import sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.policy import presets
state, toolkit, gateway, reach, *calls = sys.argv[1:]
for _ in range(2):
    with Sandbox.create(policy=presets.agent(gateway), state_dir=state, toolkit=toolkit) as box:
        print(box.commands.run(["python3", "-c", reach, *calls]).stdout.split())
"""


def test_the_uplink_is_this_processs_own_network_by_default(internet, tmp_path, toolkit):
    """A process in the internet, whose sandboxes reach a gateway at one of its addresses."""
    words = [
        str(tmp_path),
        str(toolkit),
        f"{PRIVATE}:81",
        REACH,
        f"tcp('{PRIVATE}', 81)",
        f"tcp('{HOST}', 80)",
    ]
    done = links.run_in(
        internet.namespace,
        lambda: subprocess.run(
            [sys.executable, "-c", BY_DEFAULT, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ),
    )
    assert (done.stdout, done.stderr) == ("['hello', 'EPERM']\n" * 2, "")
    wait_until(lambda: internet.devices() == ["lo"])
    assert check_integrity(tmp_path).is_clean
