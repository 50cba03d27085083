"""Replays of a recorded team on the whole live stack: what the benches of teams measure.

A server of its own (gateway, prefill and decode worker), real sandboxes, the task's hidden tests. Nothing is
different from `dockyard team run`, but that a command can be told to sleep first. The sleep happens inside of
the sandbox and not in the model's words, so every run has the same tokens and finds the same prefixes cached.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from cli.endpoint import own_server
from cli.wiring import Workbench
from cluster.config import DockyardConfig
from evals import team_bugs
from evals.bugs import BugTask
from protocol.events import Interval
from teams.dag import Dag
from teams.harness.recorded import run_replay
from teams.harness.recording import Recording, load_recording
from teams.harness.task import TeamOutcome
from teams.model_client import http_models
from teams.tools import Run, parse_action
from teams.workspace import AgentSandbox, CommandResult, SandboxFactory, Tree

TASK = "h11"


@dataclass(frozen=True, slots=True)
class Tool:
    """One command of one agent of a recording."""

    agent: str
    command: str


@dataclass(frozen=True, slots=True)
class Replay:
    """One finished replay."""

    outcome: TeamOutcome
    dag: Dag
    wall_s: float  # by a stopwatch around the run, which knows nothing of its events

    @property
    def makespan_s(self) -> float:
        return self.dag.makespan_s

    def interval(self, tool: Tool) -> Interval:
        """The run of that command."""
        return next(
            interval
            for interval in self.dag.intervals
            if interval.agent == tool.agent and interval.attributes.get("command") == tool.command[:200]
        )

    def on_path_s(self, tool: Tool) -> float:
        """Seconds of the critical path that are charged to that command."""
        wanted = self.interval(tool).id
        segments = self.dag.critical_path().segments
        return sum(segment.duration_ns for segment in segments if segment.interval == wanted) / 1e9

    def slack_s(self, tool: Tool) -> float:
        """Seconds by which that command may grow before the makespan does."""
        return self.dag.slack()[self.interval(tool).id]


class SleepyBoxes:
    """A `SandboxFactory` whose boxes sleep before some commands."""

    def __init__(self, boxes: SandboxFactory, sleeps: Mapping[Tool, float]) -> None:
        self._boxes = boxes
        self._sleeps = sleeps

    async def __call__(self, name: str, tree: Tree) -> AgentSandbox:
        agent = name.rpartition(".")[2]
        box = await self._boxes(name, tree)
        return SleepyBox(box, {tool.command: s for tool, s in self._sleeps.items() if tool.agent == agent})


class SleepyBox:
    """An agent's box that sleeps, inside, before the given commands; else as the box that it wraps."""

    def __init__(self, box: AgentSandbox, sleeps: Mapping[str, float]) -> None:
        self._box = box
        self._sleeps = sleeps
        self.read, self.write, self.remove = box.read, box.write, box.remove
        self.snapshot, self.kill, self.shortfalls = box.snapshot, box.kill, box.shortfalls

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        seconds = self._sleeps.get(command, 0.0)
        slowed = f"sleep {seconds:g}; {command}" if seconds else command
        return await self._box.run(slowed, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ReplayStack:
    """A running server and a task whose recording can be replayed on it, one replay at a time."""

    bench: Workbench
    url: str
    task: BugTask

    async def replay(
        self,
        recording: Recording,
        label: str,
        sleeps: Mapping[Tool, float] | None = None,
        *,
        hidden_tests: bool = True,
    ) -> Replay:
        """One run, from the first agent to the hidden tests; `label` names its event log.

        Raises as `run_replay`.
        """
        boxes = SleepyBoxes(self.bench.boxes(), sleeps or {})
        task = team_bugs.team_task(self.task, boxes)
        if not hidden_tests:
            task = replace(task, verify=None)
        options = self.bench.options(label, lambda line: None)
        models = http_models(f"{self.url}/v1", model=self.bench.config.model, run_id=options.run_id)
        start_s = time.monotonic()
        outcome = await run_replay(recording, task, models, options=options)
        return Replay(outcome, Dag(outcome.events), time.monotonic() - start_s)

    async def set_pace(self, role: str, factor: float) -> None:
        """Stretch a worker's steps to `factor` times their length."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as http:
            reply = await http.post(f"/dockyard/workers/{role}/pace", json={"factor": factor})
            reply.raise_for_status()


@asynccontextmanager
async def replay_stack(config: DockyardConfig) -> AsyncGenerator[ReplayStack]:
    """The stack for the length of the block; nothing of it stays. Blocks the event loop at both ends."""
    with own_server(config) as server:
        bench = Workbench.open(config)
        task = await team_bugs.open_task(TASK, bench.state.cache, bench.boxes())
        yield ReplayStack(bench, server.url, task)


def whole_recording() -> Recording:
    """The recording that ships."""
    return load_recording(team_bugs.recording_path(TASK))


def tool_of(recording: Recording, agent: str, number: int) -> Tool:
    """The command of one of an agent's turns, counted from 1; it must be a `run`."""
    action = parse_action(recording.agents[agent][number - 1].text)
    assert isinstance(action, Run), f"turn {number} of {agent} is {action.do}, not run"
    return Tool(agent, action.cmd)
