"""What a sandbox was refused, counted by what it tried: bounded, however often it tries."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sandbox.results import Denial

# Where it was refused: places of the kernel's, the resolver, and what there was no room to tell apart.
Hook = Literal["connect", "send", "bind", "socket", "packet", "wire", "name", "other"]
# What the node's guard refuses.
Deed = Literal["bpf", "trace", "signal", "mount", "namespaces", "module"]
_DEEDS: dict[Deed, str] = {
    "bpf": "using BPF",
    "trace": "tracing a process that is not of this sandbox",
    "signal": "signalling a process that is not of this sandbox",
    "mount": "mounting",
    "namespaces": "making a user namespace",
    "module": "having the kernel load a module",
}

MAX_KINDS = 256  # kept apart; further ones count together
_SOCKET_TYPES = {1: "stream", 2: "datagram", 3: "raw", 5: "seqpacket"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What was tried. `port` of a socket is its type. `why` is empty but for names, whose `address` is the
    name."""

    hook: Hook | Deed
    address: str = ""
    port: int = 0
    protocol: str = ""
    why: str = ""

    def denial(self, count: int) -> Denial:
        """In words."""
        times = "once" if count == 1 else f"{count} times"
        match self.hook:
            case "name":
                text = f"{self.address} {self.why}, asked for {times}"
            case "socket":
                kind = _SOCKET_TYPES.get(self.port, str(self.port))
                return Denial(
                    "network", count, f"a {kind} socket was refused {times}", protocol=self.protocol
                )
            case "other":
                text = f"more was refused, {times}"
            case "bind":
                text = f"binding {self.address} port {self.port} ({self.protocol}) was refused {times}"
            case "bpf" | "trace" | "signal" | "mount" | "namespaces" | "module":
                return Denial("guard", count, f"{_DEEDS[self.hook]} was refused {times}")
            case "connect" | "send" | "packet" | "wire":
                what = {"connect": "connecting to", "send": "sending to"}.get(self.hook, "sending packets to")
                text = f"{what} {self.address} port {self.port} ({self.protocol}) was refused {times}"
        return Denial("network", count, text, self.address, self.port, self.protocol)


Counts = Mapping[Attempt, int]
Watcher = Callable[[Attempt, int], None]  # of one attempt, and how many there have been of its kind


class Refusals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Attempt, int] = {}
        self.watcher: Watcher | None = None

    def leave(self) -> Counts:
        """In a child of a fork, where nobody adds to it: what was counted before."""
        self._lock = threading.Lock()
        return dict(self._counts)

    def add(self, attempt: Attempt) -> None:
        """Counts it, and tells the watcher on this thread."""
        with self._lock:
            if attempt not in self._counts and len(self._counts) >= MAX_KINDS:
                attempt = Attempt("other")
            self._counts[attempt] = count = self._counts.get(attempt, 0) + 1
        if (watcher := self.watcher) is not None:
            watcher(attempt, count)

    def counts(self) -> Counts:
        """All so far, in the order of their first time."""
        with self._lock:
            return dict(self._counts)


def denials_since(before: Counts, now: Counts) -> tuple[Denial, ...]:
    """What came between two counts."""
    return tuple(
        attempt.denial(count - before.get(attempt, 0))
        for attempt, count in now.items()
        if count > before.get(attempt, 0)
    )
