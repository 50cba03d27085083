"""What a sandbox may do, as one document: network, output, time, and the protections that hold it."""

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from sandbox.policy.network import Network

MIB = 1 << 20
Protection = Literal["seccomp", "landlock"]
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)


class Policy(BaseModel):
    """Validated at construction (pydantic.ValidationError names the field); immutable afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # none: the sandbox has a loopback interface of its own and no other. Else what it may connect to.
    network: Literal["none"] | Network = "none"
    # bytes kept of each of stdout and stderr, head and tail; what a model can read is far below the default.
    output_bytes: int = Field(default=MIB, ge=0, le=256 * MIB)
    # bytes that a command may print on both streams together before it is ended with `output_limit`.
    output_total_bytes: int = Field(default=64 * MIB, ge=1)
    # seconds that a command may run when the call does not say.
    timeout_s: float = Field(default=60.0, gt=0)
    # protections to go without. For trials that show what one of them is worth; the sandbox's `info` says so.
    without: frozenset[Protection] = frozenset()

    @property
    def protections(self) -> frozenset[Protection]:
        """Those that hold. A host that lacks one of them makes no sandbox."""
        return frozenset(PROTECTIONS) - self.without
