"""What-if by recomputation: what a change does to the makespan and to the path."""

import pytest

from protocol.errors import InvalidInput
from protocol.events import Edge, Interval
from teams.dag import Dag
from teams.events import EventLog
from teams.whatif import Add, Scale

S = 1_000_000_000


@pytest.fixture
def race() -> Dag:
    """Two teammates after a spawn: ann decodes 6 s, bob runs tools for 4 s; the lead joins both."""
    log = EventLog("run-1")
    log.extend(
        [
            Interval("go", "lead", "harness", 0, 1 * S),
            Interval("ann", "ann", "model.decode", 1 * S, 7 * S, "smollm2"),
            Interval("bob", "bob", "tool.run", 1 * S, 5 * S, "pytest"),
            Interval("join", "lead", "wait", 1 * S, 7 * S + S // 2),
            Interval("end", "lead", "verify", 7 * S + S // 2, 9 * S),
            Edge("spawn", "go", "ann"),
            Edge("spawn", "go", "bob"),
            Edge("join", "ann", "join"),
            Edge("join", "bob", "join"),
        ]
    )
    return Dag(log)


def test_seconds_on_the_path_arrive_in_full_and_in_slack_not_at_all(race: Dag):
    assert race.what_if(Add("ann", 2)).makespan_s == 11
    assert race.what_if(Add("bob", 2)).makespan_s == 9
    late = race.what_if(Add("bob", 3))
    assert (late.makespan_s, late.saved_s) == (10, -1)
    assert "bob" in late.path.agents
    assert "ann" not in late.path.agents


def test_speeding_up_is_limited_by_the_next_path(race: Dag):
    """Decode four times as fast saves 2 s, not 4.5 s: bob is next."""
    found = race.what_if(Scale(0.25, kind="model.decode"))
    assert (found.makespan_s, found.saved_s) == (7, 2)
    assert found.path.agents == ("lead", "bob")
    assert sum(s.duration_ns for s in found.path.segments) == found.path.makespan_ns


@pytest.mark.parametrize(
    "scale",
    [
        Scale(2, kind="model.decode"),
        Scale(2, agent="ann"),
        Scale(2, name="smollm2"),
        Scale(2, where=lambda interval: interval.id == "ann"),
        Scale(2, kind="model.decode", agent="ann"),
    ],
)
def test_what_is_scaled_can_be_chosen_by_anything(race: Dag, scale: Scale):
    assert race.what_if(scale).makespan_s == 15


def test_changes_apply_together(race: Dag):
    assert race.what_if(Scale(0, kind="model.decode"), Scale(0, kind="tool.run")).makespan_s == 3
    assert race.what_if(Add("ann", -100), Add("bob", -4)).makespan_s == 3


def test_a_point_inside_of_a_spawn_moves_with_it():
    log = EventLog("run-1")
    log.extend(
        [
            Interval("spawn", "lead", "tool.run", 0, 4 * S),
            Interval("child", "ann", "tool.run", 2 * S, 9 * S),
            Edge("spawn", "spawn", "child"),
        ]
    )
    assert Dag(log).what_if(Scale(2, agent="lead")).makespan_s == 11


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Add("nobody", 1), "'nobody'"),
        (Add("join", 1), "is a wait"),
        (Add("ann", float("nan")), "nan"),
        (Scale(-1), "-1"),
        (Scale(float("inf")), "inf"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(race: Dag, change: Add | Scale, says: str):
    with pytest.raises(InvalidInput, match=says):
        race.what_if(change)


def test_cancelled_work_is_wasted():
    log = EventLog("run-1")
    log.extend(
        [
            Interval("go", "lead", "harness", 0, 1 * S),
            Interval("ann", "ann", "model.decode", 1 * S, 3 * S),
            Interval("bob", "bob", "model.decode", 1 * S, 4 * S),
            Interval("join", "lead", "wait", 1 * S, 3 * S),
            Interval("end", "lead", "verify", 3 * S, 5 * S),
            Edge("spawn", "go", "ann"),
            Edge("spawn", "go", "bob"),
            Edge("join", "ann", "join"),
        ]
    )
    run = Dag(log)
    assert (run.wasted().intervals, run.wasted().work_s) == (("bob",), 3)
    statistics = run.statistics()
    assert (statistics.wasted_s, statistics.peak_concurrency, statistics.average_concurrency) == (3, 2, 8 / 5)
    assert statistics.serial_share == pytest.approx(2 / 5)
