"""How much of a team a run was: the least that makes a critical path worth its name."""

from dataclasses import dataclass

from protocol.events import Interval
from teams.dag import Dag
from teams.harness.recording import Recording
from teams.tools import Wait, parse_action

MIN_WAITED_NS = 50_000_000  # a shorter wait found what it waited for


@dataclass(frozen=True, slots=True)
class Counts:
    """Agents and deeds of one run, or of what a recording says."""

    agents: int
    model_calls: int
    tool_runs: int
    joins: int  # that waited
    messages: int  # that unblocked

    @property
    def is_team(self) -> bool:
        """What the recording of a shipped bug must have."""
        return (
            self.agents >= 3
            and self.model_calls >= 30
            and self.tool_runs >= 15
            and self.joins >= 1
            and self.messages >= 1
        )


def counts_of(dag: Dag) -> Counts:
    """The counts of a real run, from its events."""
    waits = {interval.id for interval in dag.intervals if interval.kind == "wait" and _waited(interval)}
    return Counts(
        agents=len(dag.agents),
        model_calls=sum(interval.kind == "model.decode" for interval in dag.intervals),
        tool_runs=sum(interval.kind == "tool.run" for interval in dag.intervals),
        joins=len({edge.target for edge in dag.edges if edge.kind == "join"} & waits),
        messages=len({edge.target for edge in dag.edges if edge.kind == "message"} & waits),
    )


def recorded_counts(recording: Recording) -> Counts:
    """The counts that a recording promises: a call a turn, a tool run a digest, and its waits."""
    turns = [turn for turns in recording.agents.values() for turn in turns]
    targets = [action.target for turn in turns if isinstance(action := parse_action(turn.text), Wait)]
    return Counts(
        agents=len(recording.agents),
        model_calls=len(turns),
        tool_runs=sum(bool(turn.digest) for turn in turns),
        joins=sum(target != ["message"] for target in targets),
        messages=sum(target == ["message"] for target in targets),
    )


def _waited(interval: Interval) -> bool:
    return interval.end_ns - interval.start_ns >= MIN_WAITED_NS
