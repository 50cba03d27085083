"""What a networked sandbox reaches: what its policy says, by every kind of socket, and nothing else."""

import pytest
from sandbox_internet import (
    DATAGRAMS,
    EVERY_SERVER,
    HOST,
    HOST_6,
    METADATA,
    NAT64_HOST,
    OTHER,
    OWN,
    OWN_6,
    PRIVATE,
    UDP_PORT,
    WEB,
    WEB_6,
    attempt,
)

from sandbox import Destination, Network, Policy
from sandbox.errors import InvalidArgument
from sandbox.policy import presets


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
    shut = (METADATA, f"::ffff:{METADATA}", PRIVATE, f"::ffff:{PRIVATE}", OWN, OWN_6)
    calls = [f"tcp('{host}', 80)" for host in (*shut, HOST, HOST_6)]
    ended, denials = attempt(box, *calls, f"tcp('{OWN}', 6379)", f"udp('{OWN}', {UDP_PORT})")
    assert ended == ["EPERM"] * 6 + ["hello"] * 2 + ["EPERM"] * 2
    refused = {(each.address, each.port) for each in denials}
    assert {(METADATA, 80), (PRIVATE, 80), (OWN, 80), (OWN, 6379)} < refused


def test_what_is_written_opens_private_ranges_and_nothing_else_does(connect):
    """Metadata in a document that the checks have not seen: the kernel refuses it by itself."""
    metadata = Destination.model_construct(to=METADATA, ports=(80,), protocol="tcp")
    written = [
        Destination(to=PRIVATE, ports=(80,)), metadata, Destination(to=OWN, ports=(80, "6379-6380"))
    ]  # fmt: skip
    box = connect(policy=Policy(network=Network(destinations=tuple(written))))
    calls = [f"tcp('{PRIVATE}', 80)", f"tcp('{METADATA}', 80)", f"tcp('{OWN}', 6379)", f"tcp('{OWN}', 80)"]
    assert attempt(box, *calls)[0] == ["hello", "EPERM", "EPERM", "hello"]


def test_a_destination_of_the_control_plane_alone_is_refused(connect):
    """Where it is this machine's: whoever writes it would wait for ever."""
    with pytest.raises(InvalidArgument, match=rf"destinations\.0: port 22 of {OWN}/32 is of this machine"):
        connect({"to": OWN, "ports": [22]})
    box = connect({"to": HOST, "ports": [22]})
    with pytest.raises(InvalidArgument, match="control plane"):
        box.set_network(Network(destinations=(Destination(to=OWN, ports=("6379",)),)), 1)
    assert box.network_version == 1


@pytest.mark.parametrize("gateway", [PRIVATE, OWN])
def test_the_agent_preset_is_the_gateway_and_nothing_else(connect, gateway):
    """On another machine, or on an address of this one, as `dockyard serve --host` has it."""
    box = connect(policy=presets.agent(f"{gateway}:81"))
    ended, _ = attempt(box, f"tcp('{gateway}', 81)", f"tcp('{gateway}', 80)", f"tcp('{HOST}', 81)")
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


def test_attempts_are_counted_without_end(connect):
    script = f"""
import socket
for port in range(1, 2001):
    socket.socket().connect_ex(("{OTHER}", 1 + port % 400))
"""
    denials = connect().commands.run(["python3", "-c", script], timeout_s=60).denials
    assert sum(each.count for each in denials) == 2000
    assert len(denials) <= 257
