"""A small sibling of the critical path's bench: real sandboxes that sleep, a model that costs nothing."""

import asyncio
import subprocess
import sys

import pytest

from bench import neighbours
from bench.run_all import run
from bench.short_team import IN_SLACK, ON_PATH, SLEEPS, short_recording
from bench.team_counts import counts_of
from bench.team_replays import TASK, Replay, SleepyBoxes
from evals.team_sandboxes import BoxConfig, Boxes
from protocol.clock import SystemClock
from sandbox.audit import leftovers
from sandbox.places import default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit
from teams.dag import Dag
from teams.harness.recorded import run_replay
from teams.harness.task import TeamTask
from teams.model_client import Completion, Phase
from teams.workspace import Tree

WORKSPACE = Tree({"h11/_readers.py": b"a = 1\n", "h11/tests/test_io.py": b""})


class Said:
    """Says at once what it is forced to."""

    async def complete(self, messages, *, max_tokens, temperature, seed, forced=None):
        now = SystemClock().now_ns()
        return Completion(forced, (Phase("model.decode", now, now, "gateway"),), 1, 1)

    async def close(self):
        pass


@pytest.fixture
def replay(tmp_path):
    """Replays the short team with sleeps; at the end nothing of its sandboxes is left."""
    toolkit = default_toolkit(default_state_dir())
    build_toolkit(toolkit)
    boxes = Boxes(BoxConfig(substrate="function", state_dir=tmp_path, toolkit=toolkit, lifetime_s=120))

    def replayed(sleeps):
        task = TeamTask(TASK, "mend it", WORKSPACE, SleepyBoxes(boxes, sleeps))
        outcome = asyncio.run(run_replay(short_recording(), task, lambda agent: Said()))
        return Replay(outcome, Dag(outcome.events), 0.0)

    yield replayed
    assert not leftovers(tmp_path)


def test_a_sleep_is_on_the_path_where_the_tool_is_and_nowhere_else(replay):
    tester = next(iter(SLEEPS))
    slowed = replay({tester: 1.0, ON_PATH: 0.5, IN_SLACK: 0.25})
    assert slowed.on_path_s(ON_PATH) >= 0.5
    assert slowed.on_path_s(tester) >= 1.0
    assert slowed.on_path_s(IN_SLACK) == 0.0
    assert slowed.slack_s(ON_PATH) == 0.0
    assert slowed.slack_s(IN_SLACK) > 0.0
    assert slowed.interval(IN_SLACK).end_ns - slowed.interval(IN_SLACK).start_ns >= 250_000_000
    counts = counts_of(slowed.dag)
    assert (counts.agents, counts.model_calls, counts.joins, counts.messages) == (3, 11, 1, 1)


def test_the_work_of_a_child_is_not_that_of_others():
    before = neighbours.sample()
    work = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    after = neighbours.sample()
    assert after.own_s - before.own_s >= 0.4


def test_a_bench_runs_in_a_process_of_its_own():
    outcome = run("critical_path_known", quick=True)
    assert outcome.value is not None, outcome.failure
    assert outcome.value["name"] == "critical_path_known"
    assert all(outcome.value["known_answers"].values())
