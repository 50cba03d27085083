"""A network policy is replaced as a whole, for the version that was expected."""

import asyncio

import pytest
from sandbox_internet import (
    DATAGRAMS,
    HOST,
    REACH,
    UDP_PORT,
    WEB,
    attempt,
    wait_until,
)

from sandbox import AsyncSandbox, Policy
from sandbox.errors import InvalidArgument, SandboxGone, UnsupportedError, VersionConflict
from sandbox.policy import Network


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


def test_asyncio_code_changes_the_policy_too(connect):
    async def change(box):
        ours = AsyncSandbox(box)
        version = await ours.set_network(Network(), ours.network_version)
        result = await ours.commands.run(["python3", "-c", REACH, f"tcp('{HOST}', 80)"])
        return version, result.stdout, result.denials == ours.denials

    assert asyncio.run(change(connect(WEB))) == (2, "EPERM\n", True)
