"""What a sandbox may do, as one document: network, places, devices, output, time, and the protections that
hold it.

Every field but `network` and `without` narrows what sandboxes have by default; a value that would widen it is
refused with the field's name. `without` is for trials, and said in all that a sandbox says of itself.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

from pydantic import Field, ValidationError, field_serializer, field_validator, model_validator

from sandbox.errors import InvalidArgument
from sandbox.layers import LayerWish
from sandbox.policy.base import Document, refusal
from sandbox.policy.network import Network
from sandbox.policy.paths import plain

MIB = 1 << 20
MAX_TIMEOUT_S = 30 * 86_400.0  # as long as a sandbox can live
MAX_PLACES = 64  # of a field
Protection = Literal["seccomp", "landlock", "apparmor", "guard"]
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
WANTED: frozenset[Protection] = frozenset({"apparmor", "guard"})
"""A host that lacks one of these makes the sandbox without it, and `info.lacking` says so."""
Device = Literal["null", "zero", "full", "random", "urandom", "tty", "ptmx"]
DEVICES: frozenset[Device] = frozenset(get_args(Device))
"""Of /dev; `ptmx` is what terminals are made with."""


class Policy(Document):
    """Checked when it is made (InvalidArgument names the field and its value); immutable afterwards."""

    # none: the sandbox has a loopback interface of its own and no other. Else what it may connect to.
    network: Literal["none"] | Network = "none"
    # networks by name that `Sandbox.enter_phase` puts in its place, such as one to install and one to work.
    phases: Mapping[str, Literal["none"] | Network] = Field(default_factory=dict, max_length=64)
    # bytes kept of each of stdout and stderr, head and tail; what a model can read is far below the default.
    output_bytes: int = Field(default=MIB, ge=0, le=256 * MIB)
    # bytes that a command may print on both streams together before it is ended with `output_limit`.
    output_total_bytes: int = Field(default=64 * MIB, ge=1, le=1 << 34)
    # seconds of a command that is waited for (`run`), when the call does not say.
    timeout_s: float = Field(default=60.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    # seconds that a call may say, and that a command has which is only started; None: as long as the sandbox.
    max_timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    # places that may be read and not be written, and places that may be neither; with all that lies below.
    # For what is in writable directories, by path, and AppArmor's to hold.
    protected: tuple[str, ...] = Field(default=(), max_length=MAX_PLACES)
    hidden: tuple[str, ...] = Field(default=(), max_length=MAX_PLACES)
    # places of the image and of /proc that show nothing, and ones that are not written to, the image's own
    # writable directories among them. By mounts, which every host has.
    masked: tuple[str, ...] = Field(default=(), max_length=MAX_PLACES)
    read_only: tuple[str, ...] = Field(default=(), max_length=MAX_PLACES)
    # what of /dev it has; each that is left out is the null device there. Without ptmx: no terminals.
    devices: frozenset[Device] = DEVICES
    # capabilities of its processes: none, which nothing adds to.
    capabilities: frozenset[str] = frozenset()
    # where what is written lies when the call does not say; see `Sandbox.create`.
    layer: LayerWish = "auto"
    # protections to go without. For trials that show what one of them is worth; the sandbox's `info` says so.
    without: frozenset[Protection] = frozenset()

    @field_validator("network", mode="before")
    @classmethod
    def _network_is_no_name(cls, value: object) -> object:
        return _checked_network(value)

    @field_validator("phases", mode="before")
    @classmethod
    def _phases_are_no_names(cls, value: object) -> object:
        if isinstance(value, Mapping):
            for each in cast(Mapping[str, object], value).values():
                _checked_network(each)
        return cast(object, value)

    @field_validator("protected", "hidden", "masked", "read_only")
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

    @field_validator("masked")
    @classmethod
    def _spares_init(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        for place in places:
            if _top(place) in (".dockyard", "dev") or plain(place) == "/proc":
                raise ValueError(f"{place!r} is what every sandbox needs; devices are `devices`'")
        return places

    @field_validator("read_only")
    @classmethod
    def _spares_devices(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        for place in places:
            if _top(place) == "dev":
                raise ValueError(
                    f"{place!r}: /dev is read-only in every sandbox, but for /dev/shm and its devices, "
                    "which programs need; leave it out, narrow `devices`, or name /dev/shm in `protected`"
                )
        return places

    @field_validator("capabilities")
    @classmethod
    def _none(cls, names: frozenset[str]) -> frozenset[str]:
        if names:
            raise ValueError(f"{', '.join(sorted(names))}: sandboxes have none, and none can be added")
        return names

    @field_validator("devices")
    @classmethod
    def _with_null(cls, names: frozenset[Device]) -> frozenset[Device]:
        return frozenset((*names, "null"))  # which stands for the others

    @field_serializer("devices", "capabilities", "without")
    def _in_order(self, names: frozenset[str]) -> list[str]:
        """Sets are written in another order by each process."""
        return sorted(names)

    @model_validator(mode="after")
    def _held(self) -> "Policy":
        if (self.protected or self.hidden) and "apparmor" in self.without:
            raise ValueError("protected and hidden are AppArmor's to hold, which `without` switches off")
        if self.read_only and "landlock" in self.without:
            raise ValueError("read_only is Landlock's to hold too, which `without` switches off")
        return self

    def __hash__(self) -> int:
        """Equal policies hash alike, whatever the order of their phases."""
        rest = (value for name, value in self if name != "phases")
        return hash((frozenset(self.phases.items()), *rest))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Checks what it changes, as the constructor does."""
        del deep  # nothing in it can be changed
        return type(self)(**{**dict(self), **(update or {})})

    @property
    def first_network(self) -> Network | None:
        """Of a sandbox as it is made; None where it never has one. A later phase may need what the first does
        not: its namespace is then there from the start, with nothing allowed."""
        if self.network != "none":
            return self.network
        return Network() if any(each != "none" for each in self.phases.values()) else None

    @property
    def first_timeout_s(self) -> float:
        """Of a command that is waited for, when the call does not say."""
        return min(self.timeout_s, self.max_timeout_s or math.inf)

    @property
    def left_out(self) -> tuple[Device, ...]:
        """Devices that it does not have, in the order of their names."""
        return tuple(sorted(DEVICES - self.devices))

    @property
    def protections(self) -> frozenset[Protection]:
        """Those that are asked for. A host that lacks one makes no sandbox, but for WANTED ones."""
        return frozenset(PROTECTIONS) - self.without


def read_policy(text: str) -> Policy:
    """A policy of its JSON. Raises InvalidArgument, which names the field."""
    try:
        policy = Policy.model_validate_json(text)
    except ValidationError as error:
        raise refusal(error) from None
    json.loads(text, object_pairs_hook=_once_each)
    return policy


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Of an object's fields. Raises InvalidArgument for a second of one name: JSON would take the last, and
    whoever checks a policy reads the first."""
    fields = dict[str, object]()
    for name, value in pairs:
        if name in fields:
            said = f"{name} is there twice: {reprlib.repr(fields[name])} and {reprlib.repr(value)}"
            raise InvalidArgument(said, hint="leave one of them")
        fields[name] = value
    return fields


def _checked_network(value: object) -> object:
    """Raises ValueError for a text other than none, which is most often the name of a preset."""
    if isinstance(value, str) and value != "none":
        raise ValueError(
            'neither \'none\' nor a network such as {"services": ["pypi"]} or {"destinations": '
            '[{"to": "10.0.0.5", "ports": [8000]}]}; presets are whole policies: '
            "sandbox.policy.presets, or `dockyard sandbox run --preset NAME`"
        )
    return value


def _top(place: str) -> str:
    return plain(place).split("/")[1]
