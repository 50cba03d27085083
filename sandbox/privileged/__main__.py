"""python -I -S sandbox/privileged USER [socket=PATH] [memory=BYTES] [pids=NUMBER] [cpu=MICROSECONDS], which
`dockyard node helper` and its unit run as root."""

import atexit
import fcntl
import os
import pwd
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

HERE = Path(__file__).resolve().parent
# Of the project these files alone: the package above them would bring all of it.
sys.modules["sandbox"] = package = ModuleType("sandbox")
package.__path__ = [str(HERE.parent)]

from sandbox.privileged import trust  # noqa: E402 - after the package is what it is to be

OBJECT = HERE.parent / "egress" / "egress.bpf.o"
PLACE = Path("/run/dockyard")


def main(user: str, *words: str) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit())
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # or closing a user's socket may take as long as he likes
    atexit.register(signal.signal, signal.SIGALRM, signal.SIG_IGN)  # or it ends the interpreter's own end
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or nobody would learn how `ip` has ended
    os.umask(0o022)
    os.environ.clear()
    os.environ["PATH"] = trust.PROGRAMS
    PLACE.mkdir(parents=True, exist_ok=True)
    PLACE.chmod(0o755)  # whoever of root's has made it, or its user would not find us
    check()
    from sandbox.privileged.ranges import Ranges  # checked by now
    from sandbox.privileged.server import Node

    uid = find_uid(user)
    lock(uid)
    bounds = dict(word.split("=", 1) for word in words)
    at = Path(bounds.pop("socket", PLACE / f"helper-{uid}.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        draft = Path(f"{at}.{os.getpid()}")
        listener.bind(str(draft))
        draft.chmod(0o600)
        os.chown(draft, uid, -1)
        listener.listen()
        draft.rename(at)  # where it is found only now, in the place of one that was killed
        try:
            say(f"listens at {at}, serving uid {uid} (Ctrl-C ends it and all it has made)")
            Node(listener, uid, str(OBJECT), Ranges(uid, PLACE / "ids"), bounds).serve()
        finally:
            at.unlink()
            say("ended")


def check() -> None:
    """Ends the process where others could change what it runs."""
    used = [Path(folder, "ip") for folder in trust.PROGRAMS.split(":")]
    found = trust.first_foreign([*trust.running(), OBJECT, PLACE, *used])
    for folder in (HERE, *map(Path, sys.path)):
        found = found or trust.first_foreign_below(folder)
    if found is not None:
        end(f"{found} can be changed by others than root, who would run it; install where only root writes")


def find_uid(user: str) -> int:
    """Of a name or a number. Ends the process for nobody's, and for root's."""
    uid = 0
    with suppress(KeyError):
        uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    if not 0 < uid < 1 << 31:
        end(f"{user!r} is no ordinary user")
    return uid


def lock(uid: int) -> None:
    """One for a user, since each removes at its start what it finds of an earlier one. Held to the end."""
    try:
        fd = os.open(PLACE / f"helper-{uid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        end(f"a helper for uid {uid} runs already; end it first")


def say(words: str) -> None:
    """To whoever started it, who may read no more."""
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"dockyard node helper: {words}\n")


def end(words: str) -> NoReturn:
    """Not to be tried again, for the unit."""
    say(words)
    sys.exit(2)


main(*sys.argv[1:])
