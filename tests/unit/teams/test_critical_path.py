"""The backward walk, rule by rule, on small runs whose path can be read off a drawing."""

import pytest

from protocol.errors import InvalidInput
from protocol.events import Edge, EdgeKind, Interval, IntervalKind
from teams.critical_path import Path
from teams.dag import Dag
from teams.events import EventLog

S = 1_000_000_000


def act(id: str, agent: str, start: float, end: float, kind: IntervalKind = "tool.run") -> Interval:
    return Interval(id, agent, kind, round(start * S), round(end * S), name=id)


def wait(id: str, agent: str, start: float, end: float) -> Interval:
    return act(id, agent, start, end, "wait")


def dag(*events: Interval | Edge, strict: bool = True, final: str | None = None) -> Dag:
    log = EventLog("run-1")
    log.extend(events)
    return Dag(log, strict=strict, final=final)


def rows(path: Path) -> list[tuple[str, str, float]]:
    return [(s.kind, s.name, s.duration_ns / S) for s in path.segments]


def check(path: Path) -> None:
    """What holds of every path: its segments follow each other and sum to the makespan."""
    assert sum(s.duration_ns for s in path.segments) == path.makespan_ns
    assert all(a.end_ns == b.start_ns for a, b in zip(path.segments, path.segments[1:], strict=False))
    assert all(s.duration_ns > 0 for s in path.segments)


def test_one_agent_is_its_own_path_and_a_gap_is_harness():
    path = dag(act("a", "lead", 0, 2), act("b", "lead", 2, 3), act("c", "lead", 3.5, 5)).critical_path()
    check(path)
    assert rows(path) == [
        ("tool.run", "a", 2),
        ("tool.run", "b", 1),
        ("harness", "gap", 0.5),
        ("tool.run", "c", 1.5),
    ]
    assert [s.is_harness_gap for s in path.segments] == [False, False, True, False]
    assert (path.makespan_s, path.length_s) == (5.0, 5.0)


def fork_join(*extra: Interval | Edge) -> Dag:
    """A lead spawns two, the slower of whom ends at 8; the lead goes on at 8.5."""
    return dag(
        act("plan", "lead", 0, 1),
        act("spawn1", "lead", 1, 1.5),
        act("spawn2", "lead", 1.5, 2),
        wait("join", "lead", 2, 8.5),
        act("answer", "lead", 8.5, 10),
        act("one", "ann", 1.6, 5),
        act("two", "bob", 2.25, 8),
        Edge("spawn", "spawn1", "one"),
        Edge("spawn", "spawn2", "two"),
        Edge("join", "one", "join"),
        Edge("join", "two", "join"),
        *extra,
    )


def test_a_join_is_crossed_to_the_slowest_and_its_delays_are_handoffs():
    run = fork_join()
    path = run.critical_path()
    check(path)
    assert rows(path) == [
        ("tool.run", "plan", 1),
        ("tool.run", "spawn1", 0.5),
        ("tool.run", "spawn2", 0.5),
        ("handoff", "spawn", 0.25),
        ("tool.run", "two", 5.75),
        ("handoff", "join", 0.5),
        ("tool.run", "answer", 1.5),
    ]
    assert path.agents == ("lead", "bob")
    assert path.edge_kinds == {"spawn", "join"}
    assert [(c.edge.source, c.time_ns) for c in path.crossings] == [("spawn2", 2 * S), ("two", 8 * S)]
    assert run.slack() == {
        "plan": 0, "spawn1": 0, "spawn2": 0, "join": 0, "answer": 0, "one": 3, "two": 0
    }  # fmt: skip
    assert run.agents == ("lead", "ann", "bob")


def test_a_message_that_lay_there_already_leaves_the_waiter_its_own_path():
    path = dag(
        act("send", "ann", 0, 1),
        act("work", "lead", 0, 4),
        wait("take", "lead", 4, 4.5),
        act("end", "lead", 4.5, 5),
        Edge("message", "send", "take"),
    ).critical_path()
    check(path)
    assert rows(path) == [("tool.run", "work", 4), ("handoff", "take", 0.5), ("tool.run", "end", 0.5)]
    assert path.edge_kinds == set()


def test_a_wait_for_the_first_of_two_is_crossed_to_that_one():
    """The other runs on after the wait has ended: it did not end it."""
    path = dag(
        act("fast", "ann", 0, 3),
        act("slow", "bob", 0, 9),
        wait("any", "lead", 0, 3),
        act("end", "lead", 3, 10),
        Edge("join", "fast", "any"),
        Edge("join", "slow", "any"),
    ).critical_path()
    check(path)
    assert rows(path) == [("tool.run", "fast", 3), ("tool.run", "end", 7)]


def test_a_source_that_is_closed_late_is_entered_where_the_waiter_went_on():
    path = dag(
        act("send", "ann", 0, 4),
        wait("take", "lead", 1, 3),
        act("end", "lead", 3, 5),
        Edge("message", "send", "take"),
    ).critical_path()
    check(path)
    assert rows(path) == [("tool.run", "send", 3), ("tool.run", "end", 2)]


def test_a_child_that_starts_inside_of_its_spawn_is_entered_there():
    run = dag(act("spawn", "lead", 0, 2), act("child", "ann", 1, 5), Edge("spawn", "spawn", "child"))
    check(run.critical_path())
    assert rows(run.critical_path()) == [("tool.run", "spawn", 1), ("tool.run", "child", 4)]
    assert run.slack()["spawn"] == pytest.approx(0, abs=1e-6)


def test_a_child_whose_first_interval_is_a_wait_hangs_on_its_spawn():
    path = dag(
        act("spawn", "lead", 0, 1),
        act("tell", "lead", 1, 3),
        wait("task", "ann", 1.5, 3.5),
        act("do", "ann", 3.5, 6),
        Edge("spawn", "spawn", "task"),
        Edge("message", "tell", "task"),
    ).critical_path()
    check(path)
    assert rows(path) == [
        ("tool.run", "spawn", 1),
        ("tool.run", "tell", 2),
        ("handoff", "message", 0.5),
        ("tool.run", "do", 2.5),
    ]


def test_time_without_a_known_predecessor_is_untraced():
    path = dag(act("a", "lead", 0, 1), act("b", "ann", 2, 5), wait("w", "ann", 5, 7)).critical_path()
    check(path)
    assert rows(path) == [
        ("untraced", "before the agent's first interval", 2),
        ("tool.run", "b", 3),
        ("untraced", "w", 2),
    ]


def test_parallel_calls_of_one_agent_join_at_the_slowest():
    run = dag(
        act("ask", "lead", 0, 1), act("x", "lead", 1, 4), act("y", "lead", 1, 6), act("z", "lead", 6, 7)
    )
    assert rows(run.critical_path()) == [("tool.run", "ask", 1), ("tool.run", "y", 5), ("tool.run", "z", 1)]
    assert run.slack()["x"] == 2


def test_an_overlap_within_the_tolerance_is_program_order():
    path = dag(act("a", "lead", 0, 1.0004), act("b", "lead", 1, 2)).critical_path()
    check(path)
    assert [s.name for s in path.segments] == ["a", "b"]


def test_an_edge_into_the_middle_of_work_moves_nothing_but_counts_as_use():
    run = dag(act("note", "ann", 0, 2), act("long", "lead", 0, 9), Edge("message", "note", "long"))
    assert rows(run.critical_path()) == [("tool.run", "long", 9)]
    assert run.wasted().intervals == ()


def test_intervals_without_an_end_close_at_the_last_time():
    log = EventLog("run-1")
    log.begin(act("a", "lead", 1, 1))
    log.add(act("b", "ann", 0, 4))
    path = Dag(log).critical_path()
    check(path)
    assert path.makespan_s == 4.0


@pytest.mark.parametrize(
    ("kind", "source", "target", "says"),
    [
        ("join", "gone", "join", "unknown id.*'gone'"),
        ("join", "one", "gone", "unknown id.*'gone'"),
        ("message", "answer", "plan", "effect before cause"),
    ],
)
def test_an_edge_that_cannot_be_true_is_refused_or_left_out(
    kind: EdgeKind, source: str, target: str, says: str
):
    bad = Edge(kind, source, target)
    with pytest.raises(InvalidInput, match=says):
        fork_join(bad)
    good = fork_join()
    lenient = dag(*good.intervals, *good.edges, bad, strict=False)
    assert [p.edge for p in lenient.problems] == [bad]
    assert lenient.critical_path() == good.critical_path()


def test_a_cycle_is_refused_or_cut_without_touching_what_lies_behind_it():
    events = [
        wait("a", "lead", 0, 2),
        wait("b", "ann", 0, 2),
        act("c", "bob", 2, 3),
        Edge("message", "a", "b"),
        Edge("message", "b", "a"),
        Edge("message", "a", "c"),
    ]
    with pytest.raises(InvalidInput, match="cycle"):
        dag(*events)
    lenient = dag(*events, strict=False)
    assert {p.edge.target for p in lenient.problems} == {"a", "b"}
    check(lenient.critical_path())
    assert [c.edge.target for c in lenient.critical_path().crossings] == ["c"]


def test_an_agent_that_outlives_the_answer_is_cut_off_on_request():
    events = [act("answer", "lead", 0, 5), act("late", "ann", 1, 9), act("later", "ann", 9, 10)]
    assert dag(*events).makespan_s == 10.0
    cut = dag(*events, final="answer")
    check(cut.critical_path())
    assert (cut.makespan_s, rows(cut.critical_path())) == (5.0, [("tool.run", "answer", 5)])
    assert cut.wasted().intervals == ("late",)
    with pytest.raises(InvalidInput, match="'nobody'"):
        dag(*events, final="nobody")


def test_an_empty_log_has_no_path():
    with pytest.raises(InvalidInput, match="no interval"):
        dag()


def test_a_run_of_no_length():
    path = dag(act("a", "lead", 1, 1)).critical_path()
    assert (path.segments, path.makespan_ns) == ((), 0)


def test_a_cycle_that_appears_when_another_is_cut_is_cut_too():
    """Without `a`, the edge from `b` would hold the wait, whose end `b` itself waits for."""
    lenient = dag(
        wait("w", "lead", 0, 10),
        wait("a", "ann", 0, 10),
        act("b", "bob", 10, 15),
        Edge("join", "a", "w"),
        Edge("join", "w", "a"),
        Edge("join", "w", "b"),
        Edge("message", "b", "w"),
        strict=False,
    )
    assert {(p.edge.source, p.edge.target) for p in lenient.problems} == {
        ("a", "w"), ("w", "a"), ("w", "b"), ("b", "w")
    }  # fmt: skip
    check(lenient.critical_path())
