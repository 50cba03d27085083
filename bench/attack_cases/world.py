"""A network namespace with servers: what networked sandboxes are connected to instead of the world."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.attack_cases.programs import program
from sandbox.egress import links
from sandbox.egress.service import Egress, check
from sandbox.errors import SandboxError

# Addresses for documentation and the like: nobody's.
HOST, OTHER, HOST_6, PRIVATE = "198.51.100.7", "198.51.100.8", "2001:db8::7", "10.11.12.13"
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


def missing() -> str:
    """Why there is no networked sandbox here, empty where there is."""
    try:
        check()
    except SandboxError as error:
        return str(error)
    return ""


class World:
    """Made with `with`. `egress` connects sandboxes to it."""

    egress: Egress

    def __init__(self, state_dir: Path, asked: Path) -> None:
        """Names that its name server is asked for are added to the file `asked`."""
        self._state_dir, self._asked = state_dir, asked
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.namespace = links.new_namespace()
        path = Path(f"/proc/self/fd/{self.namespace}")
        self._stack.callback(os.close, self.namespace)
        own = [f"address add {each}/32 dev lo" for each in _VERSION_4]
        own += [f"address add {each}/128 dev lo nodad" for each in _VERSION_6]
        links.configure(self.namespace, ["link set lo up", *own])
        links.run_in(self.namespace, _forward)
        self._stack.callback(self._end, links.run_in(self.namespace, self._serve))
        self.egress = Egress(self._state_dir, uplink=path, nameserver=NAMESERVER, num_spare=0)
        self._stack.callback(self.egress.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.egress.num_entries()
        self._stack.close()
        assert left == 0, f"{left} rules of sandboxes that are gone are still in the kernel's maps"

    def asked(self) -> list[str]:
        """Names that the name server was asked for, in their order."""
        return self._asked.read_text().split() if self._asked.exists() else []

    def _serve(self) -> "subprocess.Popen[str]":
        words = ["serve", json.dumps(NAMES), NAMESERVER[0], str(self._asked)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", program("world"), *words], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    @staticmethod
    def _end(process: "subprocess.Popen[str]") -> None:
        process.kill()
        process.communicate()


def _forward() -> None:
    for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", setting).write_text("1")
    for which in ("all", "default"):  # it believes where packets come from: that is the fence's to hold
        Path("/proc/sys/net/ipv4/conf", which, "rp_filter").write_text("0")
