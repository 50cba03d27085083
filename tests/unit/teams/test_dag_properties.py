"""What holds of every run, drawn at random: odd overlaps, early children, late and impossible edges."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.events import Edge, EdgeKind, Interval, IntervalKind
from teams.dag import Dag
from teams.dag_network import WAITS
from teams.events import EventLog
from teams.path_slack import slack_ns
from teams.whatif import Scale, simulate

KINDS: tuple[IntervalKind, ...] = ("model.decode", "tool.run", "harness", "wait", "wait", "tool.queue")
EDGES: tuple[EdgeKind, ...] = ("spawn", "join", "message", "unblock")
Run = tuple[list[Interval], list[Edge]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Agents whose intervals follow, leave gaps or overlap, and edges between any two of them."""
    intervals: list[Interval] = []
    for agent in range(draw(st.integers(1, 4))):
        now = draw(st.integers(0, 20))
        for _ in range(draw(st.integers(1, 6))):
            start = max(0, now + draw(st.integers(-3, 4)))
            now = start + draw(st.integers(0, 12))
            name = f"i{len(intervals)}"
            intervals.append(Interval(name, f"agent{agent}", draw(st.sampled_from(KINDS)), start, now, name))
    ids = st.sampled_from([i.id for i in intervals])
    pairs = draw(st.lists(st.tuples(st.sampled_from(EDGES), ids, ids), max_size=12))
    return intervals, [Edge(kind, a, b) for kind, a, b in pairs if a != b]


def dag(run: Run, tolerance_ns: int = 0) -> Dag:
    log = EventLog("run-1")
    log.extend([*run[0], *run[1]])
    return Dag(log, strict=False, tolerance_ns=tolerance_ns)


@given(runs(), st.sampled_from([0, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_segments_follow_each_other_and_sum_to_the_makespan(run: Run, tolerance_ns: int):
    path = dag(run, tolerance_ns).critical_path()
    begin, end = min(i.start_ns for i in run[0]), max(i.end_ns for i in run[0])
    assert path.makespan_ns == end - begin == sum(s.duration_ns for s in path.segments)
    at = begin
    for segment in path.segments:
        assert segment.start_ns == at < segment.end_ns
        at = segment.end_ns


@given(runs(), st.sampled_from([0, 1, 3]))
@settings(deadline=None)
def test_a_what_if_without_change_is_the_recorded_run(run: Run, tolerance_ns: int):
    network = dag(run, tolerance_ns).network
    durations = [network.recorded.duration_ns(i) for i in range(len(network.intervals))]
    assert simulate(network, durations) == network.recorded


@given(runs())
@settings(max_examples=150, deadline=None)
def test_slack_is_exact_to_the_nanosecond(run: Run):
    network = dag(run).network
    makespan = network.makespan_ns(network.recorded)
    durations = [network.recorded.duration_ns(i) for i in range(len(network.intervals))]
    for index, slack in enumerate(slack_ns(network)):
        assert slack >= 0
        if network.is_held(index):
            continue
        for growth, grows in ((slack, False), (slack + 1, True)):
            changed = [d + growth * (i == index) for i, d in enumerate(durations)]
            assert (network.makespan_ns(simulate(network, changed)) > makespan) == grows


@given(runs())
@settings(deadline=None)
def test_what_the_path_runs_through_to_its_end_has_no_slack(run: Run):
    it = dag(run)
    ends = {i.id: i.end_ns for i in it.intervals}
    slack = it.slack()
    for segment in it.critical_path().segments:
        if segment.interval and segment.end_ns == ends[segment.interval]:
            assert slack[segment.interval] == 0


@given(runs(), st.integers(2, 1000))
@settings(deadline=None)
def test_scaling_time_scales_the_path(run: Run, factor: int):
    scaled = [replace(i, start_ns=i.start_ns * factor, end_ns=i.end_ns * factor) for i in run[0]]
    before, after = dag(run), dag((scaled, run[1]))
    assert [s.duration_ns * factor for s in before.critical_path().segments] == [
        s.duration_ns for s in after.critical_path().segments
    ]
    assert before.structural_path().length_ns * factor == after.structural_path().length_ns


@given(runs())
@settings(deadline=None)
def test_shares_sum_to_the_makespan_and_to_one_hundred(run: Run):
    it = dag(run)
    makespan = it.critical_path().makespan_ns
    found = it.attribution()
    for table in (found.by_kind, found.by_agent, found.by_phase):
        assert sum(share.duration_ns for share in table) == makespan
        assert sum(round(share.percent * 10) for share in table) == (1000 if makespan else 0)


@given(runs(), st.sampled_from([0, 3]))
@settings(deadline=None)
def test_the_structural_path_is_a_lower_bound(run: Run, tolerance_ns: int):
    it = dag(run, tolerance_ns)
    statistics = it.statistics()
    structural = it.structural_path()
    assert 0 <= structural.length_ns <= it.critical_path().makespan_ns
    assert structural.length_ns <= structural.work_ns
    assert statistics.average_concurrency <= statistics.peak_concurrency
    assert 0 <= statistics.serial_share <= 1


@given(runs())
@settings(deadline=None)
def test_splitting_an_interval_keeps_the_makespan_and_the_structural_length(run: Run):
    """Cut the last interval of the path in two: edges into its start and out of its end stay with a half."""
    final = max(run[0], key=lambda i: (i.end_ns, i.start_ns))
    if final.kind in WAITS or final.end_ns - final.start_ns < 2 or len(agent_of(run, final)) > 1:
        return
    middle = (final.start_ns + final.end_ns) // 2
    halves = [replace(final, end_ns=middle), replace(final, id="second", start_ns=middle)]
    edges = [replace(e, source="second") if e.source == final.id else e for e in run[1]]
    before, after = dag(run), dag(([i for i in run[0] if i != final] + halves, edges))
    assert after.makespan_s == before.makespan_s
    assert after.structural_path().work_ns == before.structural_path().work_ns


def agent_of(run: Run, interval: Interval) -> list[Interval]:
    return [i for i in run[0] if i.agent == interval.agent]


@given(runs())
@settings(deadline=None)
def test_an_unrelated_activity_off_the_path_changes_nothing(run: Run):
    begin, end = min(i.start_ns for i in run[0]), max(i.end_ns for i in run[0])
    before = dag(run)
    bystander = Interval("bystander", "bystander", "tool.run", begin, max(begin, end - 1))
    after = dag(([*run[0], bystander], run[1]))
    if end > begin:
        assert after.critical_path() == before.critical_path()
        assert "bystander" in after.wasted().intervals


@given(runs())
@settings(deadline=None)
def test_faster_work_never_makes_the_run_longer(run: Run):
    it = dag(run)
    assert it.what_if(Scale(0.5)).makespan_s <= it.makespan_s <= it.what_if(Scale(2.0)).makespan_s
