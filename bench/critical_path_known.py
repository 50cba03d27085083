"""The critical path against known answers, and its time for 100,000 events.

`python -m bench.critical_path_known --json [--quick]`. Known answers: the CPM textbook project, closed forms
of fork-join and of reduction trees, the stage formula of critical steps, and random projects for which
networkx is the oracle. `--quick` checks fewer random projects and times two runs instead of five.

The value is CPU time: the analysis is one thread that never waits, so on an idle machine this is also the
wall time, and on a busy one it does not measure the neighbours. Wall times stand beside it.
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import networkx

from bench import common
from protocol.events import Edge, Interval, IntervalKind
from teams.dag import Dag
from teams.events import EventLog
from teams.whatif import Scale

S = 1_000_000_000
TARGET_S = 2.0
NUM_EVENTS = 100_000
_nx: Any = networkx

Project = Mapping[str, tuple[int, Sequence[str]]]  # task -> (seconds, predecessors)

TEXTBOOK: Project = {
    "A": (3, ""), "B": (4, "A"), "C": (2, "A"), "D": (5, "B"),
    "E": (1, "C"), "F": (2, "C"), "G": (4, "DE"), "H": (3, "FG"),
}  # fmt: skip


def schedule(project: Project) -> Dag:
    """Each task an agent of its own that starts when its predecessors have ended; tasks in that order."""
    log, end = EventLog("known"), dict[str, int]()
    for task, (seconds, after) in project.items():
        start = max((end[p] for p in after), default=0)
        end[task] = start + seconds
        log.add(Interval(task, task, "tool.run", start * S, end[task] * S, task))
        log.extend(Edge("unblock", p, task) for p in after)
    return Dag(log)


def oracle_length(project: Project) -> int:
    """networkx, with the weight of a task on the edges out of it."""
    graph = _nx.DiGraph()
    for task, (seconds, after) in project.items():
        graph.add_edge(task, "end", weight=seconds)
        graph.add_weighted_edges_from((p, task, project[p][0]) for p in after)
    return int(_nx.dag_longest_path_length(graph))


def textbook() -> bool:
    run = schedule(TEXTBOOK)
    path = [segment.name for segment in run.critical_path().segments]
    slack = {task: round(value) for task, value in run.slack().items() if value}
    return run.makespan_s == 19 and path == list("ABDGH") and slack == {"C": 6, "E": 6, "F": 9}


def fork_join() -> bool:
    return all(_fork_join(n, w, s, j) for n in (1, 2, 16) for w in (1, 20) for s in (1, 3) for j in (1, 2))


def _fork_join(n: int, work: int, spawn: int, join: int) -> bool:
    log = EventLog("known")
    for k in range(n):
        born = (k + 1) * spawn
        log.add(Interval(f"s{k}", "lead", "harness", k * spawn * S, born * S))
        log.add(Interval(f"c{k}", f"c{k}", "tool.run", born * S, (born + work) * S))
        log.extend([Edge("spawn", f"s{k}", f"c{k}"), Edge("join", f"c{k}", "join")])
    joined = n * spawn + work
    log.add(Interval("join", "lead", "wait", n * spawn * S, joined * S))
    log.add(Interval("end", "lead", "harness", joined * S, (joined + join) * S))
    run = Dag(log)
    return run.makespan_s == run.structural_path().length_s == joined + join


def tree() -> bool:
    """2^k leaves of a second each: k + 1 seconds with unlimited agents."""
    return all(_tree(k) for k in range(8))


def _tree(k: int) -> bool:
    log = EventLog("known")
    for level in range(k + 1):
        for n in range(2 ** (k - level)):
            name = f"{level}.{n}"
            log.add(Interval(name, name, "tool.run", level * S, (level + 1) * S))
            if level:
                log.extend(Edge("join", f"{level - 1}.{2 * n + c}", name) for c in (0, 1))
    found = Dag(log).structural_path()
    return found.length_s == k + 1 and found.work_ns == (2 ** (k + 1) - 1) * S


def stages() -> bool:
    """Main 2 with sub-agents of 3, 5 and 1 steps, then main 1: 8 critical steps of 12."""
    log = EventLog("known")
    rows = [("m", "lead", [0, 1]), ("a", "a", [2, 3, 4]), ("b", "b", [2, 3, 4, 5, 6]), ("c", "c", [2])]
    for name, agent, starts in [*rows, ("end", "lead", [7])]:
        for start in starts:
            log.add(Interval(f"{name}{start}", agent, "model.decode", start * S, (start + 1) * S))
    log.add(Interval("w", "lead", "wait", 2 * S, 7 * S))
    log.extend(Edge("spawn", "m1", f"{sub}2") for sub in "abc")
    log.extend(Edge("join", last, "w") for last in ("a4", "b6", "c2"))
    found = Dag(log).statistics()
    return (found.critical_steps, found.steps) == (8, 12)


def random_projects(count: int) -> bool:
    """Length, and slack by the oracle: growing by it changes nothing, by a second more adds a second."""
    rng = random.Random(7)
    return all(_agrees(_random_project(rng), rng) for _ in range(count))


def _random_project(rng: random.Random) -> Project:
    names = [f"t{n}" for n in range(rng.randint(2, 40))]
    return {
        name: (rng.randint(1, 20), [p for p in names[:n] if rng.random() < 3 / (n + 1)])
        for n, name in enumerate(names)
    }


def _agrees(project: Project, rng: random.Random) -> bool:
    run, length = schedule(project), oracle_length(project)
    task = rng.choice(sorted(project))
    seconds, after = project[task]
    slack = round(run.slack()[task])
    return (
        run.makespan_s == run.structural_path().length_s == length
        and oracle_length({**project, task: (seconds + slack, after)}) == length
        and oracle_length({**project, task: (seconds + slack + 1, after)}) == length + 1
    )


def large_log(num_events: int, num_agents: int = 50) -> EventLog:
    """A made run: agents in turns of prefill, decode, tool and a wait for some other agent's last step."""
    rng, log = random.Random(1), EventLog("large")
    now, last = [0] * num_agents, [""] * num_agents
    turn: tuple[IntervalKind, ...] = ("model.prefill", "model.decode", "tool.run", "wait")
    count = step = 0
    while count < num_events:
        agent, other = step % num_agents, rng.randrange(num_agents)
        kind = turn[step // num_agents % len(turn)]
        if kind == "wait" and other == agent:
            other = (agent + 1) % num_agents
        end = max(now[agent], now[other]) if kind == "wait" else now[agent] + rng.randint(1, 2 * S)
        log.add(Interval(f"i{step}", f"agent{agent}", kind, now[agent], end))
        if kind == "wait":
            log.add(Edge("message", last[other], f"i{step}"))
        now[agent], last[agent] = end, f"i{step}"
        count += 2 if kind == "wait" else 1
        step += 1
    return log


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one call."""

    cpu_s: float
    wall_s: float


def spent(call: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


@dataclass(frozen=True, slots=True)
class Large:
    """The large log: seconds of CPU, and whether what must hold exactly does."""

    events: int
    segments: int
    path: tuple[Spent, ...]  # building the network and walking it
    slack: Spent
    statistics: Spent
    what_if: Spent
    sums_exactly: bool
    what_if_of_nothing_is_the_run: bool

    @property
    def path_cpu_s(self) -> float:
        """The least of the repeats is the least disturbed."""
        return min(each.cpu_s for each in self.path)


def measure(repeats: int) -> Large:
    log = large_log(NUM_EVENTS)
    path_spent = tuple(spent(lambda: Dag(log).critical_path()) for _ in range(repeats))
    run = Dag(log)
    path = run.critical_path()
    return Large(
        events=len(log.intervals) + len(log.edges),
        segments=len(path.segments),
        path=path_spent,
        slack=spent(run.slack),
        statistics=spent(run.statistics),
        what_if=spent(lambda: run.what_if(Scale(2.0, kind="model.decode"))),
        sums_exactly=sum(s.duration_ns for s in path.segments) == path.makespan_ns,
        what_if_of_nothing_is_the_run=run.what_if().path == path,
    )


def report(quick: bool) -> dict[str, object]:
    """Everything that the bench says, as one object."""
    known = {
        "textbook": textbook(),
        "fork_join": fork_join(),
        "tree": tree(),
        "stages": stages(),
        "random_projects": random_projects(50 if quick else 1_000),
    }
    large = measure(2 if quick else 5)
    exact = large.sums_exactly and large.what_if_of_nothing_is_the_run
    return {
        "name": "critical_path_known",
        "value": large.path_cpu_s,
        "unit": f"CPU s for {NUM_EVENTS} events",
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "target": TARGET_S,
        "met": all(known.values()) and exact and large.path_cpu_s <= TARGET_S,
        "env": {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "quick": quick,
        "known_answers": known,
        "large": asdict(large),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.critical_path_known", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer random projects, two timed runs")
    options = parser.parse_args(arguments)
    found = report(options.quick)
    if options.json:
        print(json.dumps(found))
    else:
        print(json.dumps(found, indent=2))
    return 0 if found["met"] else 1


if __name__ == "__main__":
    common.run(main)
