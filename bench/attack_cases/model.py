"""What a case of the attack suite is: what is tried, what a shut door says, and the positive control that
shows the attempt to be a real one. Plain values; `trial.py` runs them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sandbox import Policy
from sandbox.policy import Protection

if TYPE_CHECKING:
    from bench.attack_cases.arena import Arena

Substrate = Literal["function", "container"]
SUBSTRATES: tuple[Substrate, ...] = ("function", "container")
Effect = Literal["denied", "contained"]
# user: an ordinary one. namespace: an ordinary one with every capability in namespaces of its own.
Identity = Literal["user", "root", "namespace"]


class Unguarded(Exception):
    """Nothing can be tried outside here; the message says why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one attempt came to. `said`: what it achieved, or what stopped it, an errno or a reason."""

    opened: bool
    said: str


@dataclass(frozen=True, slots=True)
class Box:
    """A sandbox to try things in; None where the default limit holds. `alone`: made for one attempt, which
    may use it up; else attempts of the same box share it."""

    pids: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    cpu: float | None = None
    policy: Policy = field(default_factory=Policy)
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """A function of a program in `probes/`, and where it runs. What the program prints decides; where it did
    not come to print, the reason for which the command ended does."""

    program: str
    function: str
    arguments: tuple[str, ...] = ()
    box: Box = Box()
    timeout_s: float = 30.0


Deed = Callable[["Arena"], Seen]
Attack = Probe | Deed


@dataclass(frozen=True, slots=True)
class Without:
    """The same probe in a sandbox without these protections. Where they are several, the probe must find the
    door shut by each of them alone."""

    protections: frozenset[Protection]


@dataclass(frozen=True, slots=True)
class Raised:
    """The same probe in a sandbox with a wider limit."""

    box: Box


@dataclass(frozen=True, slots=True)
class Outside:
    """The same probe outside of a sandbox, under the guard of `guard.py`."""

    identity: Identity
    arguments: tuple[str, ...] | None = None  # the attack's, where left out


@dataclass(frozen=True, slots=True)
class Instead:
    """The same probe in the same sandbox, aimed at something that it may have."""

    arguments: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Shown:
    """Something else that can go wrong only where the attempt is a real one."""

    deed: Deed
    what: str


@dataclass(frozen=True, slots=True)
class NoControl:
    """Nothing shows that the attempt could succeed: the case counts as not shown."""

    reason: str


@dataclass(frozen=True, slots=True)
class Apart:
    """The table of calls holds it, and so does the rest, each by itself. In a sandbox without the table the
    probe finds the door shut, or says what is in `also`. Outside, as one who has all else that it takes, it
    finds it shut under the table alone, and open without."""

    identity: Identity
    arguments: tuple[str, ...] | None = None  # outside; the attack's, where left out
    also: frozenset[str] = frozenset()


Positive = Without | Raised | Outside | Instead | Shown | Apart
Control = Positive | NoControl
WITHOUT_SECCOMP = Without(frozenset({"seccomp"}))
WITHOUT_LANDLOCK = Without(frozenset({"landlock"}))
WITHOUT_BOTH = Without(frozenset({"seccomp", "landlock"}))


@dataclass(frozen=True, slots=True)
class Case:
    """One way to attack, by its number in the list of known attacks. `shut` has what a shut door may say:
    anything else is a fault of the case or of the sandbox, and fails. `needs` gives the reason for which this
    machine cannot express the case, if there is one."""

    number: int
    name: str
    title: str
    attack: Attack
    shut: frozenset[str]
    mechanism: str
    control: Control
    effect: Effect = "denied"
    on: tuple[Substrate, ...] = SUBSTRATES
    needs: Callable[[], str] | None = None
    soak: bool = False  # too long for every run of the tests

    @property
    def key(self) -> str:
        """Such as `16-mount-tmpfs`; unique on a substrate."""
        return f"{self.number:02}-{self.name}"


@dataclass(frozen=True, slots=True)
class Absent:
    """A case of the list that cannot be expressed yet, and why."""

    number: int
    title: str
    reason: str
