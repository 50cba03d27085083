"""Starts the helper with root for one user (sandbox/privileged): checks that what runs is root's, works out
what the node denies to all sandboxes, and becomes it."""

import fcntl
import os
import pwd
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.places import EGRESS_OBJECT, helper_socket

PROGRAM = Path(__file__).parent / "privileged"
UNIT = """[Unit]
Description=Dockyard: cgroups, ids and networks for the sandboxes of %i

[Service]
ExecStart={program} node helper --user %i
Restart=on-failure
KillMode=mixed

[Install]
WantedBy=multi-user.target
"""


def helper_words(uid: int, place: Path) -> list[str]:
    """The command that is the helper: an interpreter that takes nothing from environment, home or site."""
    interpreter = str(Path(sys.executable).resolve())  # not the one of an environment, which may be anybody's
    return [interpreter, "-I", "-S", str(PROGRAM), str(place), str(uid), str(EGRESS_OBJECT)]


def run_helper(user: str, place: Path | None = None) -> NoReturn:
    """Becomes the helper for that user, a name or a number; it listens at `place`, by default where that
    user's sandboxes look. Raises InvalidArgument, UnsupportedError."""
    if os.geteuid() != 0:
        raise UnsupportedError("the helper needs root", hint="start it as root, or by systemd (--unit)")
    uid = find_uid(user)
    parts = (sys.executable, os.__file__, EGRESS_OBJECT, *PROGRAM.glob("*.py"))
    if (foreign := first_foreign(path for path in map(Path, parts) if path.exists())) is not None:
        raise UnsupportedError(
            f"{foreign} can be changed by others than root, who would run it",
            hint="install the project where only root writes, and start the helper from there",
        )
    place = place or helper_socket(uid)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    _lock(uid, user)
    place.unlink(missing_ok=True)  # of one that was killed
    command = helper_words(uid, place)
    os.execve(command[0], command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})


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


def first_foreign(paths: Iterable[Path]) -> Path | None:
    """The first of these files and the folders above them that somebody else than root could replace."""
    for path in paths:
        for each in (path.resolve(), *path.resolve().parents):
            info = each.stat()
            is_open = info.st_mode & 0o022 and not (
                stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
            )
            if info.st_uid != 0 or is_open:
                return each
    return None


def _lock(uid: int, user: str) -> None:
    """One for a user, since each removes at its start what it finds of an earlier one. Held until the helper
    has ended. InvalidArgument where one runs."""
    file = helper_socket(uid).with_suffix(".lock")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise InvalidArgument(f"a helper for {user} runs already", hint="end it first") from None
    os.set_inheritable(fd, True)
