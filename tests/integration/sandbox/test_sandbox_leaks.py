"""Create, run, destroy, over and over: nothing may stay, and nothing may grow. `make soak` does it 10,000
times and keeps what it found (tests/soak_results)."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from machine_counts import Counts, grown, take, unreclaimable_kib
from sandbox_internet import HOST
from soak_results import keep, resident_mib

from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity
from sandbox.egress.service import Egress
from sandbox.errors import UnsupportedError
from sandbox.policy.presets import preset

SETTLES_S = 20.0  # the kernel frees namespaces and removed cgroups when it has the time
EXACT = ("fds", "threads", "mounts", "loops", "zombies")
NOISE = 40  # what other programs of a machine begin meanwhile
RARELY = 7  # a cycle in so many is of each rare kind
AT_LEAST = 60  # cycles of a kind: more than the noise, or what each of them leaves would pass for it
MAX_GROWTH_MIB = 8.0
MAX_SLAB_KIB_A_CYCLE = 2.0
SOAK = pytest.param(10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(7_200)])
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="counts things of the whole machine")


@pytest.fixture
def kinds(egress: Egress, state_dir: Path, toolkit: Path) -> Mapping[str, Mapping[str, Any]]:
    """What there is of each, by how rarely: every kind that this host can make."""
    places = {"state_dir": state_dir, "toolkit": toolkit}
    agent = {"policy": preset("agent", gateway=f"{HOST}:80"), "egress": egress}
    kinds: dict[str, dict[str, Any]] = {
        "function": {"substrate": "function"},
        "container": {"substrate": "container"},
        "networked": {"substrate": "container", **agent},
        "disk layer": {"substrate": "container", "layer": "disk", "disk_mb": 16},
        "bare": {"policy": Policy(without=frozenset({"landlock", "guard"}))},
    }
    for name, options in list(kinds.items()):
        kinds[name] = {**places, **options}
        try:
            Sandbox.create(**kinds[name]).kill()
        except UnsupportedError:
            del kinds[name]
    egress.fill()
    return kinds


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [pytest.param(500, id="short"), SOAK])
def test_cycles_leave_nothing_and_nothing_grows(kinds, egress: Egress, state_dir: Path, count: int):
    made: Counter[str] = Counter()
    run(kinds, count // 10, Counter())
    before, before_mib, before_kib = take(), resident_mib(), unreclaimable_kib()
    run(kinds, count - count // 10, made)
    egress.fill()
    more = settled(before)
    growth_mib, slab_kib = resident_mib() - before_mib, unreclaimable_kib() - before_kib
    audit = check_integrity(state_dir)
    assert set(made) == set(kinds)
    assert min(made.values()) >= AT_LEAST > NOISE, made
    print(dict(made), f"{growth_mib:.1f} MiB", f"{slab_kib} KiB of slabs", grown(before, take()))
    assert (audit.leftovers, audit.live) == ((), ())
    assert more == {}
    assert growth_mib < MAX_GROWTH_MIB
    if count > 500:
        assert slab_kib < MAX_SLAB_KIB_A_CYCLE * count
        growth = {"growth_mib": round(growth_mib, 1), "slab_kib": slab_kib}
        keep("sandbox-cycles", {"cycles": count, "kinds": dict(made), **growth, "counts": take()})


def run(kinds: Mapping[str, Mapping[str, Any]], count: int, made: Counter[str]) -> None:
    """One in RARELY is of each rare kind; the others take turns."""
    names = tuple(kinds)
    for number in range(count):
        rare = names[2:][number % RARELY : number % RARELY + 1]
        name = rare[0] if rare else names[number % 2]
        with Sandbox.create(**kinds[name]) as box:
            assert box.commands.run(["/usr/bin/true"]).ok
        made[name] += 1


def settled(before: Counts) -> Counts:
    """What there still is more of, after the kernel has had its time. Descriptors, threads, mounts, loops
    and children are ours alone; of the rest others may have begun some."""
    give_up_s = time.monotonic() + SETTLES_S
    while True:
        now = take()
        exact = {name: before[name] for name in EXACT}
        more = {**grown(before, now, NOISE), **grown(exact, now)}
        if not more or time.monotonic() > give_up_s:
            return more
        time.sleep(0.1)
