"""The short recording: one that can be replayed, with the tools where the bench expects them."""

import asyncio

import pytest

from bench.short_team import IN_SLACK, ON_PATH, SLACK_S, SLEEPS, short_recording
from bench.team_counts import Counts, recorded_counts
from bench.team_replays import SleepyBoxes, Tool, tool_of, whole_recording
from teams.tools import parse_action
from teams.workspace import CommandResult, Tree


class Box:
    """Notes what it is told to run."""

    def __init__(self):
        self.ran = []

    async def run(self, command, *, timeout_s):
        self.ran.append(command)
        return CommandResult(0, "")

    async def nothing(self, *_):
        return None

    read = write = remove = snapshot = kill = nothing
    shortfalls = ()


def run_in(name, sleeps, *commands):
    box = Box()

    async def work():
        async def made(_name, _tree):
            return box

        sleepy = await SleepyBoxes(made, sleeps)(name, Tree({}))
        for command in commands:
            await sleepy.run(command, timeout_s=1.0)

    asyncio.run(work())
    return box.ran


def test_every_turn_holds_one_action():
    actions = [parse_action(turn.text).do for turns in short_recording().agents.values() for turn in turns]
    assert actions == [
        "spawn",
        "spawn",
        "run",
        "wait",
        "submit",
        "wait",
        "run",
        "done",
        "run",
        "send",
        "done",
    ]


def test_the_tools_are_where_they_should_be():
    recording = short_recording()
    assert tool_of(recording, "mender", 2) == ON_PATH
    assert tool_of(recording, "lead", 3) == IN_SLACK
    assert [tool_of(recording, "tester", 1)] == list(SLEEPS)
    assert SLACK_S >= 3.0


def test_the_shipped_recording_has_the_tools_that_are_slowed_and_is_a_teams():
    recording = whole_recording()
    assert "test_footer" in tool_of(recording, "mender", 11).command
    assert tool_of(recording, "lead", 6).command.startswith("grep")
    assert recorded_counts(recording).is_team


def test_a_turn_that_is_no_command_is_no_tool():
    with pytest.raises(AssertionError, match="turn 1 of lead is spawn"):
        tool_of(short_recording(), "lead", 1)


def test_a_short_run_is_no_proof_of_a_team():
    counts = recorded_counts(short_recording())
    assert counts == Counts(agents=3, model_calls=11, tool_runs=0, joins=1, messages=1)
    assert not counts.is_team


def test_only_the_named_command_of_the_named_agent_sleeps():
    sleeps = {Tool("lead", "ls"): 2.0, Tool("tester", "pwd"): 1.5}
    assert run_in("run-1.lead", sleeps, "ls", "pwd", "ls -l") == ["sleep 2; ls", "pwd", "ls -l"]
    assert run_in("run-1.tester", sleeps, "ls", "pwd") == ["ls", "sleep 1.5; pwd"]
    assert run_in("verify", sleeps, "ls") == ["ls"]
