"""Known answers: the CPM textbook, closed forms of fork-join and trees, and networkx as the oracle."""

from collections.abc import Mapping, Sequence

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.events import Edge, Interval
from teams.dag import Dag
from teams.events import EventLog

S = 1_000_000_000
TEXTBOOK: Mapping[str, tuple[int, str]] = {
    "A": (3, ""), "B": (4, "A"), "C": (2, "A"), "D": (5, "B"),
    "E": (1, "C"), "F": (2, "C"), "G": (4, "DE"), "H": (3, "FG"),
}  # fmt: skip


def schedule(durations: Mapping[str, int], after: Mapping[str, Sequence[str]]) -> Dag:
    """Every task an agent of its own, started as soon as its predecessors have ended. Times in seconds."""
    log = EventLog("run-1")
    end: dict[str, int] = {}
    for task in nx.topological_sort(nx.DiGraph((p, t) for t, ps in after.items() for p in ps)):
        start = max((end[p] for p in after[task]), default=0)
        end[task] = start + durations[task]
        log.add(Interval(task, f"agent-{task}", "tool.run", start * S, end[task] * S, task))
    log.extend(Edge("unblock", p, task) for task, before in after.items() for p in before)
    return Dag(log)


def longest(durations: Mapping[str, int], after: Mapping[str, Sequence[str]]) -> int:
    """The oracle: node weights moved onto the edges out of each node."""
    graph = nx.DiGraph()
    for task, before in after.items():
        graph.add_edge(task, "end", weight=durations[task])
        graph.add_weighted_edges_from((p, task, durations[p]) for p in before)
    return nx.dag_longest_path_length(graph)


def test_the_textbook_project():
    run = schedule({t: d for t, (d, _) in TEXTBOOK.items()}, {t: list(p) for t, (_, p) in TEXTBOOK.items()})
    path = run.critical_path()
    assert path.makespan_s == 19
    assert [s.name for s in path.segments] == list("ABDGH")
    assert run.slack() == {"A": 0, "B": 0, "C": 6, "D": 0, "E": 6, "F": 9, "G": 0, "H": 0}
    assert (run.structural_path().length_s, run.structural_path().intervals) == (19, tuple("ABDGH"))


@pytest.mark.parametrize(
    ("n", "w", "spawn", "join"), [(1, 5, 1, 2), (4, 7, 2, 3), (16, 3, 1, 1), (5, 1, 4, 2)]
)
def test_fork_join_with_serial_spawns(n: int, w: int, spawn: int, join: int):
    log = EventLog("run-1")
    for k in range(n):
        born = (k + 1) * spawn
        log.add(Interval(f"spawn{k}", "lead", "harness", k * spawn * S, born * S))
        log.add(Interval(f"child{k}", f"child{k}", "tool.run", born * S, (born + w) * S))
        log.extend([Edge("spawn", f"spawn{k}", f"child{k}"), Edge("join", f"child{k}", "join")])
    log.add(Interval("join", "lead", "wait", n * spawn * S, (n * spawn + w) * S))
    log.add(Interval("merge", "lead", "harness", (n * spawn + w) * S, (n * spawn + w + join) * S))
    run = Dag(log)
    assert run.makespan_s == n * spawn + w + join
    assert run.structural_path().length_s == n * spawn + w + join
    assert run.structural_path().work_ns == (n * spawn + n * w + join) * S
    assert run.slack()["child0"] == (n - 1) * spawn


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_a_binary_reduction_tree(k: int):
    """2^k leaves of one second each need k+1 seconds with unlimited agents."""
    log = EventLog("run-1")
    for level in range(k + 1):
        for n in range(2 ** (k - level)):
            log.add(Interval(f"{level}.{n}", f"{level}.{n}", "tool.run", level * S, (level + 1) * S))
            if level:
                log.extend(Edge("join", f"{level - 1}.{2 * n + c}", f"{level}.{n}") for c in (0, 1))
    run = Dag(log)
    assert run.structural_path().length_s == k + 1 == run.makespan_s
    assert run.structural_path().parallelism == pytest.approx((2 ** (k + 1) - 1) / (k + 1))
    assert run.statistics().peak_concurrency == 2**k


def staged(stages: Sequence[tuple[int, Sequence[int]]]) -> Dag:
    """Stages of main steps, then sub-agents in parallel, then a barrier; every step takes a second."""
    log, now = EventLog("run-1"), 0
    for number, (main, subs) in enumerate(stages):
        for step in range(main):
            log.add(Interval(f"m{number}.{step}", "lead", "model.decode", now * S, (now + 1) * S))
            now += 1
        if not subs:
            continue
        for sub, steps in enumerate(subs):
            for step in range(steps):
                ids = [f"s{number}.{sub}.{step}", f"sub{number}.{sub}"]
                log.add(Interval(ids[0], ids[1], "model.decode", (now + step) * S, (now + step + 1) * S))
            log.add(Edge("spawn", f"m{number}.{main - 1}", f"s{number}.{sub}.0"))
            log.add(Edge("join", f"s{number}.{sub}.{steps - 1}", f"w{number}"))
        log.add(Interval(f"w{number}", "lead", "wait", now * S, (now + max(subs)) * S))
        now += max(subs)
    return Dag(log)


def test_critical_steps_of_two_stages():
    statistics = staged([(2, [3, 5, 1]), (1, [])]).statistics()
    assert (statistics.critical_steps, statistics.steps) == (8, 12)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4)
)
def test_critical_steps_are_the_stage_formula(stages: list[tuple[int, list[int]]]):
    statistics = staged(stages).statistics()
    assert statistics.critical_steps == sum(main + max(subs, default=0) for main, subs in stages)
    assert statistics.steps == sum(main + sum(subs) for main, subs in stages)


@st.composite
def projects(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[str]]]:
    num = draw(st.integers(2, 12))
    names = [f"t{n}" for n in range(num)]
    durations = {name: draw(st.integers(1, 9)) for name in names}
    after = {
        name: [p for p in names[:n] if draw(st.booleans())] or names[:1] * (n > 0)
        for n, name in enumerate(names)
    }
    return durations, after


@given(projects())
@settings(deadline=None)
def test_networkx_agrees_on_the_length(project: tuple[dict[str, int], dict[str, list[str]]]):
    durations, after = project
    run = schedule(durations, after)
    assert run.makespan_s == longest(durations, after)
    assert run.structural_path().length_s == longest(durations, after)


@given(projects(), st.data())
@settings(deadline=None)
def test_slack_is_exactly_what_the_oracle_forgives(
    project: tuple[dict[str, int], dict[str, list[str]]], data: st.DataObject
):
    durations, after = project
    task = data.draw(st.sampled_from(sorted(durations)))
    slack = round(schedule(durations, after).slack()[task])
    length = longest(durations, after)
    assert longest(durations | {task: durations[task] + slack}, after) == length
    assert longest(durations | {task: durations[task] + slack + 1}, after) == length + 1


@given(projects())
@settings(deadline=None)
def test_reversing_all_edges_keeps_the_length(project: tuple[dict[str, int], dict[str, list[str]]]):
    durations, after = project
    before: dict[str, list[str]] = {task: [] for task in durations}
    for task, sources in after.items():
        for source in sources:
            before[source].append(task)
    assert schedule(durations, before).makespan_s == schedule(durations, after).makespan_s
