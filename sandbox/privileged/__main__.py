"""python -I sandbox/privileged SOCKET UID PROGRAMS, as root: `dockyard node helper` runs it."""

import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

# Of the project these files alone: the package above them would bring all of it.
sys.modules["sandbox"] = package = ModuleType("sandbox")
package.__path__ = [str(Path(__file__).resolve().parents[1])]

from sandbox.privileged.server import Node  # noqa: E402 - after the package is what it is to be


def main(place: str, uid: str, programs: str) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        draft = Path(f"{place}.{os.getpid()}")
        listener.bind(str(draft))
        draft.chmod(0o600)
        os.chown(draft, int(uid), -1)
        listener.listen()
        draft.rename(place)  # where it is found only now
        try:
            Node(listener, int(uid), programs).serve()
        finally:
            Path(place).unlink()


main(*sys.argv[1:])
