"""A network namespace with servers: what networked sandboxes are connected to instead of the world."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.attack_cases.model import Unguarded
from bench.attack_cases.programs import program
from sandbox.egress import namespaces
from sandbox.egress.helped import HelpedEgress, Uplink
from sandbox.egress.service import Egress, check
from sandbox.errors import SandboxError
from sandbox.helper import shared_helper

# Addresses for documentation and the like: nobody's.
HOST, OTHER, HOST_6, PRIVATE = "198.51.100.7", "198.51.100.8", "2001:db8::7", "10.11.12.13"
OWN = "198.51.100.6"  # the world's own; to the others it answers as if they were behind it
METADATA, NAT64_OTHER = "169.254.169.254", "64:ff9b::198.51.100.8"
NAMESERVER = ("198.51.100.53", 53)
NAMES = {
    "example.org": HOST,
    "evil-example.org": OTHER,
    "example.org.evil.com": OTHER,
    "secret.example.org": OTHER,
    "rebound.example.org": PRIVATE,
}
_VERSION_4 = (HOST, OTHER, PRIVATE, METADATA, NAMESERVER[0])
_VERSION_6 = (HOST_6, NAT64_OTHER)


_lent: list[Path] = []


def lend(asked: Path) -> None:
    """From now on the world is one that root has made and put this user's helper in: names that its name
    server is asked for are added to this file."""
    _lent[:] = [asked]


def missing() -> str:
    """Why there is no networked sandbox here, empty where there is."""
    try:
        if not _lent:
            check()
    except SandboxError as error:
        return str(error)
    return ""


def missing_own() -> str:
    """The same for what takes a world of this process's own."""
    return "the world, and what enforces its rules, are root's" if _lent else missing()


@contextmanager
def served(asked: Path) -> Generator[int]:
    """A namespace with the servers, until the block ends."""
    with ExitStack() as stack:
        namespace = namespaces.new_namespace()
        stack.callback(os.close, namespace)
        others = [f"route add local {each} dev lo" for each in (*_VERSION_4, *_VERSION_6)]
        namespaces.configure(namespace, ["link set lo up", f"address add {OWN}/32 dev lo", *others])
        namespaces.run_in(namespace, _forward)
        stack.callback(_end, namespaces.run_in(namespace, lambda: _serve(asked)))
        yield namespace


class World:
    """Made with `with`. `egress` connects sandboxes to it."""

    egress: Uplink

    def __init__(self, state_dir: Path, asked: Path) -> None:
        """Names that its name server is asked for are added to the file `asked`."""
        self._state_dir, self._asked = state_dir, _lent[0] if _lent else asked
        self._stack = ExitStack()
        self._namespace: int | None = None
        self._num_before = 0

    def __enter__(self) -> Self:
        self._num_before = len(self._names())  # of an arena before this one, of the same world
        if _lent:
            helper = shared_helper(self._state_dir)
            assert helper is not None, "a world is lent with a helper"
            self.egress = HelpedEgress(helper, nameserver=NAMESERVER)
        else:
            self._namespace = self._stack.enter_context(served(self._asked))
            place = Path(f"/proc/self/fd/{self._namespace}")
            self.egress = Egress(self._state_dir, uplink=place, nameserver=NAMESERVER, num_spare=0)
        self._stack.callback(self.egress.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.egress.num_entries() if isinstance(self.egress, Egress) else 0
        self._stack.close()
        assert left == 0, f"{left} rules of sandboxes that are gone are still in the kernel's maps"

    @property
    def namespace(self) -> int:
        """Unguarded where it is root's."""
        if self._namespace is None:
            raise Unguarded("needs root, whose the world is")
        return self._namespace

    def asked(self) -> list[str]:
        """Names that the name server was asked for, in their order."""
        return self._names()[self._num_before :]

    def _names(self) -> list[str]:
        return self._asked.read_text().split() if self._asked.exists() else []


def _serve(asked: Path) -> "subprocess.Popen[str]":
    words = ["serve", json.dumps(NAMES), NAMESERVER[0], str(asked)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program("world"), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _forward() -> None:
    """And answers from addresses that are not its own."""
    for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/ip_nonlocal_bind"):
        Path("/proc/sys/net", setting).write_text("1")
    for which in ("all", "default"):  # it believes where packets come from: that is the fence's to hold
        Path("/proc/sys/net/ipv4/conf", which, "rp_filter").write_text("0")
