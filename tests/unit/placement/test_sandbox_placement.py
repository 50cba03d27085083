"""Sandboxes: a bin never promises more than it has, gives everything back, and no room is overlooked."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.amounts import Amounts, available, needed
from placement.sandboxes import Arrival, Bin, Placer, placer_of, sandbox_bins, simulate
from placement.topology import Core, Domain, Node, Topology
from placement.workers import WorkerDemand, place_workers
from protocol.errors import InvalidInput, ResourceShortage
from protocol.resources import Resources

GIB = 2**30
ROOM = Resources(cpus=4, memory_bytes=4 * GIB, pids=1000, disk_bytes=40 * GIB)
ONE = Resources(cpus=0.5, memory_bytes=GIB // 2, pids=64, disk_bytes=GIB)


def bins(*capacities: Resources) -> list[Bin]:
    return [Bin(f"bin{n}", capacity) for n, capacity in enumerate(capacities)]


def placer(some: list[Bin], seed: int = 1, sample: int = 2) -> Placer:
    return placer_of(some, random.Random(seed), sample=sample)


def test_placements_spread_and_tell_why():
    some = bins(ROOM, ROOM)
    chooser = placer(some)
    choices = [chooser.place(f"s{n}", ONE) for n in range(4)]
    assert sorted(choice.require() for choice in choices) == ["bin0", "bin0", "bin1", "bin1"]
    assert all(choice.asked == 1 for choice in choices)
    assert "12% full after it against" in choices[0].steps[-1].said
    state = some[0].state()
    assert (state.live, state.used.milli_cpus, state.used.memory_bytes) == (2, 1_000, 2**30)


def test_a_full_house_refuses_with_the_true_state_of_every_bin():
    some = bins(ROOM, Resources(cpus=1, memory_bytes=GIB // 4, pids=64, disk_bytes=GIB))
    chooser = placer(some)
    for n in range(8):
        assert chooser.place(f"s{n}", ONE).bin == "bin0"
    refused = chooser.place("s8", ONE)
    assert refused.bin is None
    with pytest.raises(
        ResourceShortage, match=r"bin1: too small: needs 0\.5 GiB memory, 0\.2 GiB memory free"
    ):
        refused.require()
    assert "bin0: needs 0.5 cpus, 0 cpus free" in refused.describe()
    chooser.release("s3")
    assert chooser.place("s8", ONE).bin == "bin0"


def test_an_old_view_costs_a_question_and_no_placement():
    """Another replica has emptied the bin that this one believes to be full, and filled the other."""
    some = bins(ROOM, ROOM)
    mine, other = placer(some), placer(some)
    whole = Resources(cpus=4, memory_bytes=GIB)
    assert mine.place("first", whole).bin is not None
    full = "bin0" if some[0].state().live else "bin1"
    other.heartbeat(one.state() for one in some)
    assert other.place("second", whole).bin not in (None, full)
    some[int(full[-1])].release("first")
    found = mine.place("third", whole)
    assert (found.bin, found.asked) == (full, 2)


def test_news_that_is_older_than_what_is_known_is_dropped():
    (one,) = some = bins(ROOM)
    chooser = placer(some)
    old = one.state()
    chooser.place("s", ONE)
    chooser.heartbeat([old])
    assert "25% full after it" in chooser.place("t", ONE).steps[-1].said


def test_the_same_sandbox_twice_is_one_admission():
    (one,) = bins(ROOM)
    first = one.admit("s", needed(ONE))
    again = one.admit("s", needed(ONE))
    assert first == again
    assert not one.admit("s", needed(ROOM)).admitted
    one.release("s")
    assert one.release("s").used == Amounts()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Resources(cpus=-1), "cpus: -1"),
        (Resources(cpus=float("nan")), "cpus: nan"),
        (Resources(pids=-5), "pids: -5"),
    ],
)
def test_what_is_no_amount_is_refused(wrong: Resources, says: str):
    with pytest.raises(InvalidInput, match=says):
        placer(bins(ROOM)).place("s", wrong)
    with pytest.raises(InvalidInput):
        Placer({}, random.Random(0), sample=0)


def test_threads_that_admit_at_once_never_exceed_the_capacity():
    (one,) = bins(ROOM)

    def admit(agent: int) -> None:
        for n in range(50):
            one.admit(f"{agent}-{n}", needed(ONE))

    threads = [threading.Thread(target=admit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.check_integrity()
    assert one.state().live == 8


def test_bins_of_a_machine_hold_what_its_workers_leave():
    cores = tuple(Core(n, (n,)) for n in range(2))
    topology = Topology((Node("a", (Domain(0, cores, 16 * GIB, 12 * GIB),)),))
    workers = place_workers(topology, [WorkerDemand("decode", 3 * GIB)])
    (one,) = sandbox_bins(topology, disk_bytes=10 * GIB, pids=100, workers=workers)
    assert one.state().capacity == available(Resources(8, 8 * GIB, 100, 10 * GIB))
    with pytest.raises(InvalidInput, match="cpu_overcommit"):
        sandbox_bins(topology, disk_bytes=1, pids=1, cpu_overcommit=0)


amounts = st.builds(
    Resources,
    cpus=st.floats(0, 4),
    memory_bytes=st.integers(0, 4 * GIB),
    pids=st.integers(0, 200),
    disk_bytes=st.integers(0, 10),
    gpus=st.integers(0, 2),
)


@given(st.lists(amounts, min_size=1, max_size=4), st.lists(st.tuples(amounts, st.booleans()), max_size=25))
@settings(deadline=None)
def test_never_over_committed_and_everything_comes_back(
    capacities: list[Resources], events: list[tuple[Resources, bool]]
):
    some = bins(*capacities)
    chooser = placer(some)
    live: list[str] = []
    for number, (demand, leaves) in enumerate(events):
        if leaves and live:
            chooser.release(live.pop(0))
            continue
        free = [one.state().free for one in some]
        choice = chooser.place(f"s{number}", demand)
        # Refused exactly where no bin had the room.
        assert (choice.bin is None) == (not any(needed(demand).fits_into(room) for room in free))
        live += [f"s{number}"] if choice.bin else []
        for one in some:
            one.check_integrity()
    for sandbox in live:
        chooser.release(sandbox)
    assert all(one.state().used == Amounts() for one in some)


@given(st.lists(amounts, min_size=1, max_size=4), st.lists(amounts, max_size=15), st.integers(0, 5))
@settings(deadline=None)
def test_the_same_seed_makes_the_same_choices(
    capacities: list[Resources], demands: list[Resources], seed: int
):
    first, second = (placer(bins(*capacities), seed) for _ in range(2))
    for number, demand in enumerate(demands):
        assert first.place(f"s{number}", demand) == second.place(f"s{number}", demand)


def arrivals(count: int) -> list[Arrival]:
    return [Arrival(at_s=n * 0.125, hold_s=5.0, demand=ONE) for n in range(count)]


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_simulation_spreads_over_the_bins_and_repeats(replicas: int):
    found = simulate([ROOM] * 8, arrivals(400), seed=3, replicas=replicas)
    assert found == simulate([ROOM] * 8, arrivals(400), seed=3, replicas=replicas)
    assert (found.admitted, found.refused, found.peak_live) == (400, 0, 40)
    assert max(found.live_per_bin.values()) < 2 * min(found.live_per_bin.values())
    assert found.peak_share <= 1


def test_a_simulation_of_too_much_refuses_the_rest():
    found = simulate([ROOM], arrivals(100), seed=1)
    assert (found.peak_live, found.peak_share) == (8, 1.0)
    assert found.admitted + found.refused == 100
    assert found.refused > 0
