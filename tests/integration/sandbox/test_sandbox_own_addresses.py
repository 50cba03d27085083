"""The machine's addresses while sandboxes live: its control plane is denied at those that come later too."""

import json
import subprocess
from pathlib import Path

import pytest
from ordinary_user import User, user
from sandbox_internet import EVERY_SERVER, HOST, NAMESERVER, OWN, OWN_6, REACH, Internet, attempt, wait_until

from sandbox import Network, Policy
from sandbox.egress import namespaces
from sandbox.egress.rules import (
    EVERY_PORT,
    Ports,
    Rule,
    Table,
    compile_table,
    pack_deny_key,
    pack_entry,
    prefix_of,
)
from sandbox.egress.service import Egress
from sandbox.policy import presets
from sandbox.privileged.addresses import Addresses
from sandbox.privileged.denials import CONTROL_PORTS, NOWHERE, POOL_4, POOL_6, entries

__all__ = ["user"]  # a fixture
LATER, LATER_6, NEAR = "198.51.100.9", "2001:db8::9", "203.0.113.5"


def change(world: Internet, verb: str) -> None:
    namespaces.configure(
        world.namespace, [f"address {verb} {LATER}/32 dev lo", f"address {verb} {LATER_6}/128 dev lo"]
    )


@pytest.mark.parametrize(
    ("policy", "then"), [(presets.open_internet(), ["EPERM", "EPERM"]), (None, ["EPERM", "hello"])]
)
def test_an_address_that_comes_later_is_denied_too(world: Internet, create, state_dir: Path, policy, then):
    """Also where the policy named it while it was another's, so that nothing of the rule was denied. A wider
    rule does not reach it any more, one that names it does."""
    own = {"network": {"destinations": [{"to": f"{LATER}/32", "ports": [80, 6379]}, EVERY_SERVER]}}
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    try:
        with create(policy=policy or Policy.model_validate(own), egress=egress) as box:
            calls = [f"tcp('{LATER}', 6379)", f"tcp('{LATER}', 80)"]
            assert "EPERM" not in attempt(box, *calls)[0]
            change(world, "add")
            wait_until(lambda: attempt(box, *calls)[0] == then)
            change(world, "delete")
            wait_until(lambda: "EPERM" not in attempt(box, *calls)[0])
    finally:
        egress.close()


def test_an_address_that_comes_while_a_sandbox_is_connected_is_denied(
    world: Internet, create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Behind its first rules, and before anybody knows of it who hears of addresses."""
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    replace, tables = egress.fence.replace, list[object]()

    def replace_and_change(sandbox: int, table: Table) -> None:
        replace(sandbox, table)
        tables.append(table)
        if len(tables) == 1:
            change(world, "add")
            wait_until(lambda: prefix_of(LATER_6) in egress.own)

    monkeypatch.setattr(egress.fence, "replace", replace_and_change)
    try:
        with create(policy=presets.open_internet(), egress=egress) as box:
            assert len(tables) == 2
            assert attempt(box, f"tcp('{LATER}', 80)", f"tcp('{HOST}', 80)")[0] == ["EPERM", "hello"]
    finally:
        egress.close()


def test_a_machine_with_more_addresses_than_fit_lets_nothing_through(
    world: Internet, create, state_dir: Path
):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    try:
        with create(policy=presets.open_internet(), egress=egress) as box:
            assert attempt(box, f"tcp('{HOST}', 80)")[0] == ["hello"]
            many = [f"address add 203.0.{high}.{low}/32 dev lo" for high in range(17) for low in range(256)]
            namespaces.configure(world.namespace, many)
            wait_until(lambda: attempt(box, f"tcp('{HOST}', 80)")[0] == ["EPERM"])
    finally:
        egress.close()


def test_rules_that_do_not_fit_an_address_that_goes_shut_their_sandbox_alone(
    world: Internet, create, state_dir: Path
):
    """While it is the machine's own, the wider rule does not meet the one that names it."""
    by_name = {"to": LATER, "ports": [80, 81, 90, 91, 92]}
    wider = {"to": "198.51.100.0/24", "ports": [80, 93, 94, 95, 96]}
    change(world, "add")
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    calls = [f"tcp('{each}', 80)" for each in (LATER, HOST)]
    try:
        with (
            create(policy=Policy(network=network_of(by_name, wider)), egress=egress) as box,
            create(policy=Policy(network=network_of(wider)), egress=egress) as other,
        ):
            assert attempt(box, *calls)[0] == ["hello"] * 2
            change(world, "delete")
            wait_until(lambda: attempt(box, *calls)[0] == ["EPERM"] * 2)
            assert attempt(other, calls[1])[0] == ["hello"]
            change(world, "add")
            wait_until(lambda: attempt(box, *calls)[0] == ["hello"] * 2)
            for verb, said in (("delete", "EPERM"), ("add", "hello")):  # one event each
                namespaces.configure(world.namespace, [f"address {verb} {LATER}/32 dev lo"])
                wait_until(lambda said=said: attempt(box, *calls)[0] == [said] * 2)
    finally:
        egress.close()


def network_of(*destinations: dict[str, object]) -> Network:
    return Network.model_validate({"destinations": destinations})


SCRIPT = r"""
import json, sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.egress.helped import HelpedEgress
from sandbox.helper import shared_helper
from sandbox.policy.presets import open_internet
state, toolkit = Path(sys.argv[1]), sys.argv[2]
later, reach = sys.argv[3:5]
egress = HelpedEgress(shared_helper(state))
with Sandbox.create(policy=open_internet(), egress=egress, state_dir=state, toolkit=toolkit) as box:
    print(json.dumps("made"), flush=True)
    for line in sys.stdin:
        done = box.commands.run(["python3", "-c", reach, f"tcp('{later}', 6379)", f"tcp('{later}', 80)"])
        print(json.dumps(done.stdout.split()), flush=True)
"""


def test_an_ordinary_users_sandbox_is_denied_it_too(user: User, world: Internet):
    def said(process: "subprocess.Popen[str]") -> object:
        assert process.stdout is not None
        return json.loads(process.stdout.readline())

    def tried() -> object:
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
        return said(owner)

    with user.helped(inside=world), user.start(SCRIPT, LATER, REACH, inside=world) as owner:
        assert said(owner) == "made"
        change(world, "add")
        wait_until(lambda: tried() == ["EPERM"] * 2)


def test_the_machines_addresses_are_those_that_it_has_now(world: Internet):
    addresses = namespaces.run_in(world.namespace, Addresses)
    before = set(addresses.current())
    assert {OWN, OWN_6, "127.0.0.1", "::1"} <= before
    change(world, "add")
    assert set(addresses.current()) - before == {LATER, LATER_6}
    change(world, "delete")
    assert set(addresses.current()) == before
    addresses.close()


def test_what_a_machine_answers_to_beside_its_addresses_is_its_own_too(
    world: Internet, create, state_dir: Path
):
    """A network's broadcast address, and the first of one of version 6, which is any router's."""
    namespaces.configure(
        world.namespace,
        [f"address add {NEAR}/24 dev lo", "address add 2001:db8:5::5/64 dev lo nodad"],
    )
    beside = ("203.0.113.255", "2001:db8:5::")
    addresses = namespaces.run_in(world.namespace, Addresses)
    assert {NEAR, "2001:db8:5::5", *beside} <= set(addresses.current())
    addresses.close()
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    try:
        with create(policy=presets.open_internet(), egress=egress) as box:
            calls = [f"udp('{each}', 5000)" for each in (NEAR, *beside)]
            assert attempt(box, *calls)[0] == ["EPERM"] * 3
    finally:
        egress.close()
    assert b"datagram" not in world.heard


def test_helper_and_owner_deny_the_same():
    """Both by their own table: of root's process, and of what runs without the project's rules."""
    own = (HOST, LATER_6, "127.0.0.1", "169.254.3.4", "::1", "fe80::1", "64:ff9b::c633:6408")
    rules = [Rule(prefix_of(net), EVERY_PORT) for net in (*NOWHERE, POOL_4, POOL_6)]
    everything = {rule.prefix for rule in rules}
    rules += [Rule(prefix_of(each), Ports(*ports, 0)) for each in own for ports in CONTROL_PORTS]
    expected = {
        pack_deny_key(prefix): pack_entry(ports)
        for prefix, ports in compile_table(rules, with_zones=False).items()
        if prefix in everything or not any(net.covers(prefix) for net in everything)
    }
    found = entries(own)
    for net in everything:  # every port, whatever else is said there
        assert found.pop(pack_deny_key(net)) == pack_entry((EVERY_PORT,))
        expected.pop(pack_deny_key(net))
    assert found == expected
