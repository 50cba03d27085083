"""Workers: close to their peers, never more memory than there is, cores of their own while they last."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.topology import Core, Device, Domain, Node, Topology
from placement.workers import WorkerDemand, WorkerPlacement, place_workers
from protocol.errors import InvalidInput, ResourceShortage

GIB = 2**30


def machine(*domains: tuple[int, int], gpus: int = 0, quota: float | None = None, name: str = "a") -> Node:
    """Domains as (cores, GiB free); the GPUs are at the last."""
    made: list[Domain] = []
    cpu = 0
    for number, (cores, free) in enumerate(domains):
        own = tuple(Core(cpu + n, (cpu + n,)) for n in range(cores))
        last = number == len(domains) - 1
        devices = tuple(Device(f"gpu{n}", "gpu") for n in range(gpus if last else 0))
        made.append(Domain(number, own, free * GIB, free * GIB, devices))
        cpu += cores
    return Node(name, tuple(made), quota)


def small() -> Topology:
    return Topology((machine((2, 8)),))


def pair(gib: int = 1) -> list[WorkerDemand]:
    return [WorkerDemand("prefill", gib * GIB), WorkerDemand("decode", gib * GIB, near=("prefill",))]


def test_two_workers_on_two_cores_get_one_each():
    found = place_workers(small(), pair())
    assert [(c.worker, c.place, c.threads, c.shares_cores) for c in found.choices] == [
        ("prefill", "a/numa0", 1, False),
        ("decode", "a/numa0", 1, False),
    ]
    assert set(found.choice("prefill").cpus).isdisjoint(found.choice("decode").cpus)
    assert (found.free_bytes, found.free_cores) == ({"a/numa0": 6 * GIB}, {"a/numa0": 0})


def test_one_core_is_shared_and_the_choice_says_so():
    found = place_workers(Topology((machine((1, 8)),)), pair())
    assert all(choice.shares_cores and choice.cpus == (0,) for choice in found.choices)
    assert "(shared)" in found.describe()


def test_spare_cores_go_round_and_stop_at_the_most_wanted():
    demands = [WorkerDemand("few", GIB, max_threads=2), WorkerDemand("many", GIB)]
    found = place_workers(Topology((machine((7, 8)),)), demands)
    assert (found.choice("few").threads, found.choice("many").threads) == (2, 5)


def test_peers_stay_in_one_domain_if_it_has_cores_for_both():
    found = place_workers(Topology((machine((4, 8), (4, 9)),)), pair())
    assert len({choice.place for choice in found.choices}) == 1
    assert "fits, but 4 of 4 cores free, 8.0 GiB free, distance 20 to its peers" in found.describe()


def test_a_worker_goes_where_its_memory_and_its_gpu_are():
    topology = Topology((machine((4, 2), (4, 2), gpus=1), machine((2, 40), name="b")))
    demands = [WorkerDemand("large", 30 * GIB), WorkerDemand("accelerated", GIB, gpus=1)]
    found = place_workers(topology, demands)
    assert (found.choice("large").place, found.choice("accelerated").place) == ("b/numa0", "a/numa1")
    assert found.choice("accelerated").gpus == ("gpu0",)
    assert "needs 30.0 GiB of memory, 2.0 GiB free" in found.describe()


def test_too_little_memory_names_both_amounts():
    with pytest.raises(
        ResourceShortage, match=r"'decode'.*needs 9\.0 GiB of memory, 8\.0 GiB free"
    ) as caught:
        place_workers(small(), [WorkerDemand("decode", 9 * GIB)])
    assert caught.value.exit_code == 4
    with pytest.raises(ResourceShortage, match=r"7\.0 GiB free"):
        place_workers(small(), [WorkerDemand("decode", 8 * GIB)], reserve_bytes=GIB)
    with pytest.raises(ResourceShortage, match="1 gpus, 0 free"):
        place_workers(small(), [WorkerDemand("decode", GIB, gpus=1)])
    with pytest.raises(ResourceShortage, match="no machine"):
        place_workers(Topology(()), pair())


def test_a_quota_bounds_the_cores():
    found = place_workers(Topology((machine((8, 8), (8, 8), quota=2.5),)), pair())
    assert sum(choice.threads for choice in found.choices) == 2


@pytest.mark.parametrize(
    ("demands", "says"),
    [
        ([WorkerDemand("x", 1), WorkerDemand("x", 1)], "'x'"),
        ([WorkerDemand("x", -1)], "memory_bytes"),
        ([WorkerDemand("x", 1, min_threads=0)], "threads"),
        ([WorkerDemand("x", 1, min_threads=3, max_threads=2)], "3..2"),
    ],
)
def test_demands_that_make_no_sense_are_refused(demands: list[WorkerDemand], says: str):
    with pytest.raises(InvalidInput, match=says):
        place_workers(small(), demands)
    with pytest.raises(InvalidInput, match="'nobody'"):
        place_workers(small(), pair()).choice("nobody")


nodes = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 16)), min_size=1, max_size=3), st.integers(0, 2)
    ),
    min_size=1,
    max_size=3,
).map(lambda all_: Topology(tuple(machine(*d, gpus=g, name=f"n{i}") for i, (d, g) in enumerate(all_))))
workers = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=6
).map(lambda all_: [WorkerDemand(f"w{i}", m * GIB, t, gpus=g) for i, (m, t, g) in enumerate(all_)])


@given(nodes, workers)
@settings(deadline=None)
def test_no_memory_no_gpu_and_no_free_core_is_given_twice(topology: Topology, demands: list[WorkerDemand]):
    try:
        found = place_workers(topology, demands)
    except ResourceShortage:
        return
    assert found == place_workers(topology, demands)
    for _, domain, place in topology.domains():
        here = [choice for choice in found.choices if choice.place == place]
        assert sum(c.memory_bytes for c in here) + found.free_bytes[place] == domain.free_bytes
        assert found.free_bytes[place] >= 0
        check_place(found, domain, [choice.worker for choice in here])
    assert [choice.worker for choice in found.choices] == [demand.name for demand in demands]


def check_place(found: WorkerPlacement, domain: Domain, names: list[str]) -> None:
    here = [found.choice(name) for name in names]
    gpus = [gpu for choice in here for gpu in choice.gpus]
    assert len(gpus) == len(set(gpus)) <= len(domain.devices)
    uses = Counter(cpu for choice in here for cpu in choice.cpus)
    assert set(uses) <= {cpu for core in domain.cores for cpu in core.cpus}
    for choice in here:
        assert choice.threads == len(choice.cpus) >= 1
        assert choice.shares_cores == any(uses[cpu] > 1 for cpu in choice.cpus)
