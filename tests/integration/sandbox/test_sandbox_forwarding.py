"""A machine that does not forward what sandboxes send beyond it says so when they are made."""

import logging
import os
from pathlib import Path

import pytest
from sandbox_internet import EVERY_SERVER, HOST, NAMESERVER, OWN, Internet

from sandbox import Policy, shortfalls
from sandbox.doctor_egress import probe_routing
from sandbox.egress import namespaces
from sandbox.egress.forwarding import SETTINGS, switched_off
from sandbox.egress.service import Egress
from sandbox.policy import presets

NO_WAY = "a way beyond this machine by version 4 of IP: net.ipv4.ip_forward is off"
NO_WAY_6 = "a way beyond this machine by version 6 of IP: net.ipv6.conf.all.forwarding is off"
NAMES = {"names": [{"domains": ["example.org"], "ports": [80]}]}


def policy(*destinations: dict[str, object], **more: object) -> Policy:
    return Policy.model_validate({"network": {"destinations": destinations, **more}})


@pytest.fixture
def world():
    if os.geteuid() != 0:
        pytest.skip("a sandbox with a network needs root")
    world = Internet()
    yield world
    world.close()


@pytest.fixture
def egress(world: Internet, state_dir: Path):
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    yield egress
    egress.close()


def forward(world: Internet, version: int, value: str) -> None:
    namespaces.run_in(world.namespace, lambda: Path("/proc/sys/net", SETTINGS[version]).write_text(value))


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


def test_the_doctor_looks_at_the_same(world: Internet):
    forward(world, 4, "0")
    assert namespaces.run_in(world.namespace, switched_off) == (4,)
    found = namespaces.run_in(world.namespace, probe_routing)
    assert (found.status, found.detail) == ("degraded", "net.ipv4.ip_forward is off")
    forward(world, 4, "1")
    assert namespaces.run_in(world.namespace, probe_routing).status == "unverified"
