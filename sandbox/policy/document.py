"""What a sandbox may do, as one document: network, output, time, and the protections that hold it."""

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sandbox.policy.network import Network

MIB = 1 << 20
Protection = Literal["seccomp", "landlock", "apparmor", "guard"]
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
WANTED: frozenset[Protection] = frozenset({"apparmor", "guard"})
"""A host that lacks one of these makes the sandbox without it, and `info.lacking` says so."""


class Policy(BaseModel):
    """Validated at construction (pydantic.ValidationError names the field); immutable afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # none: the sandbox has a loopback interface of its own and no other. Else what it may connect to.
    network: Literal["none"] | Network = "none"
    # networks by name that `Sandbox.enter_phase` puts in its place, such as one to install and one to work.
    phases: Mapping[str, Literal["none"] | Network] = Field(default_factory=dict, max_length=64)
    # bytes kept of each of stdout and stderr, head and tail; what a model can read is far below the default.
    output_bytes: int = Field(default=MIB, ge=0, le=256 * MIB)
    # bytes that a command may print on both streams together before it is ended with `output_limit`.
    output_total_bytes: int = Field(default=64 * MIB, ge=1)
    # seconds that a command may run when the call does not say.
    timeout_s: float = Field(default=60.0, gt=0)
    # places that may be read and not be written, and places that may be neither; with all that lies below.
    protected: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    # protections to go without. For trials that show what one of them is worth; the sandbox's `info` says so.
    without: frozenset[Protection] = frozenset()

    @field_validator("protected", "hidden")
    @classmethod
    def _absolute(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        for place in places:
            if not place.startswith("/") or {".", ".."} & set(place.split("/")):
                raise ValueError(f"{place!r} is no absolute path without '.' and '..'")
            if '"' in place or "\\" in place or not place.isprintable():
                raise ValueError(f"{place!r} has a quote, a backslash or a control character")
            if place.rstrip("/") == "":
                raise ValueError("'/' would leave nothing to run")
        return places

    @model_validator(mode="after")
    def _held(self) -> "Policy":
        if (self.protected or self.hidden) and "apparmor" in self.without:
            raise ValueError("protected and hidden are AppArmor's to hold, which `without` switches off")
        return self

    def __hash__(self) -> int:
        """Equal policies hash alike, whatever the order of their phases."""
        places = (self.protected, self.hidden, self.without)
        outputs = (self.output_bytes, self.output_total_bytes, self.timeout_s)
        return hash((self.network, frozenset(self.phases.items()), outputs, places))

    @property
    def first_network(self) -> Network | None:
        """Of a sandbox as it is made; None where it never has one. A later phase may need what the first does
        not: its namespace is then there from the start, with nothing allowed."""
        if self.network != "none":
            return self.network
        return Network() if any(each != "none" for each in self.phases.values()) else None

    @property
    def protections(self) -> frozenset[Protection]:
        """Those that are asked for. A host that lacks one makes no sandbox, but for WANTED ones."""
        return frozenset(PROTECTIONS) - self.without
