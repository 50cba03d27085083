"""Starts the helper with root for one user (sandbox/privileged), which checks by itself what it runs."""

import os
import pwd
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.privileged import trust

PROGRAM = Path(__file__).parent / "privileged"
_LONGEST_PLACE = 107 - len(".4194304")  # bytes; `sockaddr_un` (unix(7)), less the draft's suffix, a pid
_UNIT = """[Unit]
Description=Dockyard: cgroups, ids and networks for the sandboxes of %i

[Service]
ExecStart={command}
Restart=on-failure
RestartPreventExitStatus=2
KillMode=mixed

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a user's sandboxes, and whatever else he moves to where they are, may take together. None: no
    bound."""

    memory_mb: int | None = None
    pids: int | None = None
    cpu: float | None = None

    def words(self) -> list[str]:
        """For the helper. InvalidArgument for what is no bound."""
        for name in ("memory_mb", "pids", "cpu"):
            if (value := getattr(self, name)) is not None and not 0.01 <= value < 1 << 40:
                raise InvalidArgument(f"{name}={value!r} bounds nothing", hint="give a positive number")
        found = [] if self.memory_mb is None else [f"memory={self.memory_mb << 20}"]
        found += [] if self.pids is None else [f"pids={self.pids}"]
        return found + ([] if self.cpu is None else [f"cpu={round(self.cpu * 100_000)}"])


_UNBOUNDED = Bounds()


def helper_words(user: str, place: Path | None = None, bounds: Bounds = _UNBOUNDED) -> list[str]:
    """The command that is the helper: an interpreter that takes nothing from environment, home or site, so
    that no package and no file of the project's but `sandbox/privileged` is run. It listens at `place`, by
    default where that user's sandboxes look."""
    interpreter = str(Path(sys.executable).resolve())  # not the one of an environment, which may be anybody's
    listens = [] if place is None else [f"socket={place}"]
    return [interpreter, "-I", "-S", str(PROGRAM.resolve()), user, *listens, *bounds.words()]


def unit(bounds: Bounds = _UNBOUNDED) -> str:
    """A template for systemd, which starts the helper and nothing before it. UnsupportedError as below."""
    check_surroundings()
    return _UNIT.format(command=" ".join(helper_words("%i", None, bounds)))


def run_helper(user: str, place: Path | None = None, bounds: Bounds = _UNBOUNDED) -> NoReturn:
    """Becomes the helper for that user, a name or a number. Raises InvalidArgument, UnsupportedError."""
    if os.geteuid() != 0:
        raise UnsupportedError("the helper needs root", hint="start it as root, or by systemd (--unit)")
    check_surroundings()
    check_place(place)
    command = helper_words(str(find_uid(user)), place, bounds)
    os.execve(command[0], command, {"PATH": trust.PROGRAMS})


def check_place(place: Path | None) -> None:
    """InvalidArgument where no socket can be made there, which the helper makes beside it first."""
    if place is None:
        return
    if place.is_dir() or not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
        why, hint = "no socket can be made there", "name a file in a folder that is there, such as /run"
    elif len(os.fsencode(place)) > _LONGEST_PLACE:
        why, hint = "too long for a socket's address", f"use {_LONGEST_PLACE} bytes at most"
    else:
        return
    raise InvalidArgument(f"--socket {place}: {why}", hint=hint)


def check_surroundings() -> None:
    """Raises UnsupportedError where others than root could change what this process, which root has started,
    has run already: interpreter, environment, packages."""
    if (foreign := trust.first_foreign(_surroundings())) is not None:
        raise UnsupportedError(
            f"{foreign} can be changed by others than root, who would run it",
            hint="install the project where only root writes, and start the helper from there",
        )


def find_uid(user: str) -> int:
    """Of a name or a number. InvalidArgument for nobody, and for root, who needs no helper."""
    try:
        uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise InvalidArgument(
            f"user={user!r} is unknown", hint="use a name of /etc/passwd, or a number"
        ) from None
    if not 0 < uid < 1 << 31:
        raise InvalidArgument(f"user={user!r} is no ordinary user", hint="root needs no helper")
    return uid


def _surroundings() -> Iterator[Path]:
    yield from trust.running()
    yield Path(sys.argv[0]).absolute()
    for folder in map(Path, sys.path):
        yield from folder.glob("*.pth")  # which are code
    for module in list(sys.modules.values()):
        for name in (getattr(module, "__file__", None), getattr(module, "__cached__", None)):
            if isinstance(name, str):  # some modules answer for any name, with an object of theirs
                yield Path(name)
