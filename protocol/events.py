"""What happened in a team run: intervals of activity and the edges between them.

An agent's intervals follow each other in program order; that order needs no edge. Times are integer
nanoseconds of one host's CLOCK_MONOTONIC, so that the segments of a critical path sum exactly.
The team runtime writes all intervals. It takes those of `model.*` from the timeline in the gateway's reply,
and measures `tool.*` and `sandbox.*` around its own calls; harnesses that it does not run are not traced.
"""

from dataclasses import dataclass, field
from typing import Literal

IntervalKind = Literal[
    "model.queue",  # waiting for a place in an engine
    "model.prefill",
    "model.transfer",  # KV hand-off from prefill to decode worker
    "model.decode",
    "tool.queue",  # waiting for a box that a teammate uses
    "tool.run",
    "sandbox.create",
    "wait",  # blocked on other agents: a join, a message, a board task
    "verify",  # hidden tests in a fresh sandbox
    "harness",  # the harness's own work between model and tools
]

EdgeKind = Literal["spawn", "join", "message", "unblock"]

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of activity of one agent; `start_ns <= end_ns`."""

    id: str
    agent: str
    kind: IntervalKind
    start_ns: int
    end_ns: int
    name: str = ""  # tool name, model name, what is waited for
    attributes: dict[str, Scalar] = field(default_factory=dict[str, Scalar])


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` could not go on before `source` had ended.

    spawn: source is the parent's spawning interval, target the child's first interval.
    join, message: source is the last interval of the one waited for, target the `wait` interval that it ends
    (or, where the receiver was not waiting, the interval in which it was taken up).
    unblock: source is the interval that used a box, target the `tool.queue` interval that its release ends.
    """

    kind: EdgeKind
    source: str
    target: str
