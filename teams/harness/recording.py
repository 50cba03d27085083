"""The recording of a team run: what each agent's model said, and digests of what its tools gave.

A recording is one JSON file. It holds no tool results, only the digests of their normalised text
(`teams.digests`): they can tell that a run went another way, and can never stand in for a real result.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import InvalidInput
from teams.member import Turn
from teams.roster import AGENT_NAME


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedTurn(_Part):
    """One model call and the action in it."""

    text: str = Field(min_length=1)  # the model's whole answer
    digest: str = Field(default="", pattern=r"^([0-9a-f]{16})?$")  # of the tool's output; "": not a tool


AgentName = Annotated[str, Field(pattern=f"^{AGENT_NAME}$")]


class Recording(_Part):
    """A team run that can be replayed. `version` changes when the meaning of a field does."""

    format: Literal["dockyard.team-recording"]
    version: Literal[1]
    task: str  # the name of the task that it belongs to
    title: str
    origin: str  # who wrote the answers, and how
    licence: str  # of the few foreign lines in it, and where they come from
    agents: dict[AgentName, Annotated[tuple[RecordedTurn, ...], Field(min_length=1)]]


def load_recording(path: Path) -> Recording:
    """Reads a recording. Raises `InvalidInput` naming the file and the field that does not fit."""
    try:
        recording = Recording.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(
            f"recording {path} cannot be read: {error.strerror}", hint="give the path of a JSON file"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise InvalidInput(f"recording {path}: {where}: {first['msg']}") from error
    if "lead" not in recording.agents:
        raise InvalidInput(f"recording {path}: agents: nobody is called 'lead'")
    return recording


def save_recording(recording: Recording, path: Path) -> None:
    """Writes a recording, a field a line, so that a change of it can be read."""
    text = json.dumps(recording.model_dump(exclude_defaults=True), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def with_digests(recording: Recording, transcript: Iterable[Turn]) -> Recording:
    """The recording with the digests of a real run of it. Turns that did not happen keep theirs."""
    found = {(turn.agent, turn.number): turn.output_digest for turn in transcript}
    agents: Mapping[str, tuple[RecordedTurn, ...]] = {
        name: tuple(
            turn.model_copy(update={"digest": found.get((name, number), turn.digest)})
            for number, turn in enumerate(turns, start=1)
        )
        for name, turns in recording.agents.items()
    }
    return recording.model_copy(update={"agents": agents})
