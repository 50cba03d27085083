"""A team run of few words, on the ground of a shipped task, for benches that need many runs in little time.

The same three agents as in the shipped recording and the same kinds of doing: spawns, tools, a message that
unblocks, a join that waits. `CHAIN` says what follows from what; the sleep in the tester's tool keeps the
lead's tool, which runs beside it, off the path whatever the speed of the machine.
"""

import json
from collections.abc import Mapping

from bench.team_replays import TASK, Tool
from teams.harness.recording import RecordedTurn, Recording

CHAIN = "lead: spawn, spawn > tester: run, send > mender: run, done > lead: submit; beside it lead: run, wait"

ON_PATH = Tool("mender", "wc -l h11/_readers.py")
IN_SLACK = Tool("lead", "ls h11")
_CASES = Tool("tester", "ls h11/tests")

SLACK_S = 5.0
SLEEPS: Mapping[Tool, float] = {_CASES: SLACK_S}
"""In every run, the baseline too: the lead's tool and its next answer run beside this sleep, so that the tool
has as much slack, and what the mender does afterwards on top. It also ends before this sleep does when it is
itself slowed: else that answer would run beside others, and slow them, in some runs and not in the rest."""


def short_recording() -> Recording:
    """The recording, without digests: what the tools print is known after the first run of it."""
    return Recording(
        format="dockyard.team-recording",
        version=1,
        task=TASK,
        title="A short run of three agents",
        origin="written for this bench; it mends nothing",
        licence="Apache-2.0",
        agents={
            "lead": (
                _turn(do="spawn", name="mender", task="mend"),
                _turn(do="spawn", name="tester", task="test"),
                _turn(do="run", cmd=IN_SLACK.command),
                _turn(do="wait", **{"for": ["tester", "mender"]}),
                _turn(do="submit"),
            ),
            "mender": (
                _turn(do="wait", **{"for": "message"}),
                _turn(do="run", cmd=ON_PATH.command),
                _turn(do="done"),
            ),
            "tester": (
                _turn(do="run", cmd=_CASES.command),
                _turn(do="send", to="mender", text="go"),
                _turn(do="done"),
            ),
        },
    )


def _turn(**action: object) -> RecordedTurn:
    return RecordedTurn(text=f"```action\n{json.dumps(action)}\n```")
