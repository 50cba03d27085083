"""A machine that does not forward what sandboxes send beyond it says so when they are made."""

import logging
from pathlib import Path

import pytest
from sandbox_internet import EVERY_SERVER, HOST, NAMESERVER, OWN, Internet

from sandbox import Network, Policy, shortfalls
from sandbox.doctor_egress import probe_routing
from sandbox.egress import namespaces
from sandbox.egress.forwarding import SETTINGS, switched_off
from sandbox.egress.service import Egress
from sandbox.policy import presets

NO_WAY = "a way beyond this machine by version 4 of IP: net.ipv4.ip_forward is off"
NO_WAY_6 = "a way beyond this machine by version 6 of IP: net.ipv6.conf.all.forwarding is off"
NO_WAY_NEW = "a way beyond this machine by version 4 of IP: net.ipv4.conf.default.forwarding is off"
NEW_DEVICES = "ipv4/conf/default/forwarding"
NAMES = {"names": [{"domains": ["example.org"], "ports": [80]}]}


def policy(*destinations: dict[str, object], **more: object) -> Policy:
    return Policy.model_validate({"network": {"destinations": destinations, **more}})


@pytest.fixture
def egress(world: Internet, state_dir: Path):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    yield egress
    egress.close()


def forward(world: Internet, version: int, value: str) -> None:
    put(world, SETTINGS[version][0], value)


def put(world: Internet, name: str, value: str) -> None:
    namespaces.run_in(world.namespace, lambda: Path("/proc/sys/net", name).write_text(value))


def test_a_policy_that_leads_beyond_the_machine_says_what_it_lacks(
    world: Internet, egress: Egress, create, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shortfalls, "_told", set())
    forward(world, 4, "0")
    forward(world, 6, "0")
    with caplog.at_level(logging.WARNING):
        assert NO_WAY in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls
        assert NO_WAY in create(policy=policy(**NAMES), egress=egress).info.shortfalls
    assert caplog.text.count(NO_WAY) == 1
    later = Policy(phases={"work": policy({"to": HOST, "ports": [80]}).network})
    assert NO_WAY in create(policy=later, egress=egress).info.shortfalls
    both = create(policy=presets.open_internet(), egress=egress).info.shortfalls
    assert {NO_WAY, NO_WAY_6} <= set(both)


def test_one_of_the_machines_own_addresses_alone_lacks_nothing(world: Internet, egress: Egress, create):
    forward(world, 4, "0")
    for each in (presets.agent(f"{OWN}:80"), policy(), policy({"to": OWN, "ports": [80]})):
        assert not any("a way beyond" in one for one in create(policy=each, egress=egress).info.shortfalls)


def test_a_machine_that_forwards_by_now_is_believed(world: Internet, egress: Egress, create):
    forward(world, 4, "0")
    assert NO_WAY in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls
    forward(world, 4, "1")
    assert NO_WAY not in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls


def test_a_machine_that_stops_to_forward_is_seen_to(world: Internet, egress: Egress, create):
    assert NO_WAY not in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls
    forward(world, 4, "0")
    assert NO_WAY in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls
    forward(world, 4, "1")
    put(world, NEW_DEVICES, "0")
    assert NO_WAY_NEW in create(policy=policy(EVERY_SERVER), egress=egress).info.shortfalls


@pytest.mark.parametrize("to", ["203.0.113.7", "::ffff:203.0.113.7"])
def test_a_mapped_address_is_one_of_version_4(world: Internet, egress: Egress, to: str):
    forward(world, 4, "0")
    found = policy({"to": to, "ports": [80]}).network
    assert isinstance(found, Network)
    assert egress.lacking_ways([found]) == (NO_WAY,)


@pytest.mark.parametrize(
    ("all_", "new", "off"),
    [
        ("1", "1", {}),
        ("2", "2", {}),
        ("0", "1", {}),
        ("1", "0", {4: "net.ipv4.conf.default.forwarding"}),
        ("0", "0", {4: "net.ipv4.ip_forward"}),
    ],
)
def test_what_is_off_is_what_the_kernel_does_not_route(
    world: Internet, all_: str, new: str, off: dict[int, str]
):
    """As it says of a packet of a device that is made now."""
    put(world, SETTINGS[4][0], all_)
    put(world, NEW_DEVICES, new)
    lines = ["link add here type veth peer name there", "link set here up", "link set there up"]
    routes = ["route add 192.0.2.0/24 dev here", "route add 203.0.113.0/24 dev there"]
    namespaces.configure(world.namespace, [*lines, *routes])
    words = ["route", "get", "203.0.113.7", "from", "192.0.2.2", "iif", "here"]
    routed = namespaces.run_in(world.namespace, lambda: namespaces.run_ip(words))
    assert namespaces.run_in(world.namespace, switched_off) == off
    assert (routed.returncode == 0) is (not off), routed.stderr


def test_the_doctor_looks_at_the_same(world: Internet):
    forward(world, 4, "0")
    assert namespaces.run_in(world.namespace, switched_off) == {4: "net.ipv4.ip_forward"}
    found = namespaces.run_in(world.namespace, probe_routing)
    assert (found.status, found.detail) == ("degraded", "net.ipv4.ip_forward is off")
    forward(world, 4, "1")
    assert namespaces.run_in(world.namespace, probe_routing).status == "unverified"
