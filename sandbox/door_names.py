"""How the door of an owner's process is found: by the process's pid and start, which name a socket."""

import errno
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sandbox.processes import ProcessKey

_INODE_AT, _NAME_AT = 6, 7  # words of a line of /proc/net/unix


def name_of(owner: ProcessKey) -> str:
    """The first one, where nobody else has taken it."""
    return f"\0dockyard-{owner.pid}-{owner.start_ticks}"


def take_name(listener: socket.socket, owner: ProcessKey) -> None:
    """Whoever may run here may have taken it: then one that nobody can foretell."""
    try:
        listener.bind(name_of(owner))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.bind(f"{name_of(owner)}-{secrets.token_hex(16)}")


def other_names(owner: ProcessKey) -> Iterator[str]:
    """Of sockets that the owner itself holds, whoever has its first name. None where it may not be looked
    into, as another user's."""
    first, held = "@" + name_of(owner)[1:] + "-", set[str]()
    with suppress(OSError):
        for fd in Path(f"/proc/{owner.pid}/fd").iterdir():
            with suppress(OSError):  # it has been closed
                held.add(str(fd.readlink()))
    for words in map(str.split, Path("/proc/net/unix").read_text(errors="replace").splitlines()):
        name = words[_NAME_AT] if len(words) > _NAME_AT else ""
        if name.startswith(first) and f"socket:[{words[_INODE_AT]}]" in held:
            yield "\0" + name[1:]
