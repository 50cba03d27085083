"""Connections, one request at a time: a packet of JSON with a verb and a name, and a descriptor for some."""

import json
import os
import re
import select
import socket
import struct
from pathlib import Path

from sandbox.privileged import adoption, bounds, denials, groups
from sandbox.privileged.addresses import Addresses
from sandbox.privileged.adoption import Refused
from sandbox.privileged.networks import Programs, remove_link
from sandbox.privileged.ranges import NUM_IDS, Ranges

_MOST_CALLERS, _MOST_SANDBOXES, _MOST_BYTES, _ATTEMPTS = 8, 4096, 512, 2000
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | socket.MSG_CMSG_CLOEXEC
_MAPS = ("allowed", "attached", "counts", "events", "links")
_Answer = tuple[dict[str, object], list[int]]


class Caller:
    """One connection, and all that was made for it."""

    def __init__(self, connection: socket.socket, node: "Node") -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
        _, self._uid, self._gid = struct.unpack("=iII", peer)
        self._connection, self._node, self.fileno = connection, node, connection.fileno
        self.state = ""
        self.ids: dict[str, int] = {}  # the first of each sandbox
        self._links: dict[str, str] = {}
        self._programs: Programs | None = None

    def serve(self) -> bool:
        """One request. False when there will be no more."""
        data, fds, given = b"", list[int](), list[int]()
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, _MOST_BYTES + 1, 2, _NOW)
            reply, given = self._answer(data, fds)
        except Exception as error:  # whatever a record makes of us, the next one is served
            name, words = error.args if isinstance(error, Refused) else ("failed", str(error))
            reply = {"refused": name, "words": words[:_MOST_BYTES]}
        finally:
            for fd in fds:
                os.close(fd)
        try:
            return bool(data and socket.send_fds(self._connection, [json.dumps(reply).encode()], given, _NOW))
        except OSError:  # it does not read, or is gone
            return False

    def deny(self) -> None:
        """What the node denies now."""
        if self._programs is not None:
            self._programs.deny(self._node.denials)

    def end(self) -> list[Path]:
        """Closes it. What is to be buried, unless another connection has the state: its sandboxes' groups."""
        for name in self._links.values():
            remove_link(name)
        if self._programs is not None:
            self._programs.close()
        self._connection.close()
        return [top / self.state / sandbox for top in self._node.tops for sandbox in self.ids]

    def _answer(self, data: bytes, fds: list[int]) -> _Answer:
        if self._uid != self._node.uid:
            raise Refused("foreign", f"this helper serves uid {self._node.uid}, not uid {self._uid}")
        verbs = {"open0": self._open, "adopt1": self._adopt, "join1": self._join, "link1": self._link}
        try:
            ((verb, name),) = json.loads(data if len(data) <= _MOST_BYTES else b"").items()
            answer = (verbs | {"release0": self._release})[f"{verb}{len(fds)}"]
            pattern = self.state or f"u{self._uid}x[0-9a-f]{{12}}" if verb == "open" else "sbx-[0-9a-z]{1,32}"
            is_own = re.fullmatch(pattern, name) and (verb == "open" or self.state)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refused("bad-record", f"no request: {len(data)} bytes, {len(fds)} descriptors") from None
        if not is_own:
            raise Refused("not-yours", f"{name!r} is no name for this caller to {verb}")
        taken = {"adopt": self.ids, "link": self._links}.get(verb, {})
        if fds and (name in taken or len(taken) >= _MOST_SANDBOXES):
            raise Refused("full", f"{name} has its own, or {len(taken)} others have theirs")
        return answer(name, *fds)

    def _open(self, state: str) -> _Answer:
        if self._node.bounds and any(each.state not in ("", state) for each in self._node.callers):
            raise Refused(
                "full", "this helper has bounds for its user, who has one state directory at a time"
            )
        self._node.settle()  # perhaps of this very state
        for top in self._node.tops:
            groups.hand_over(top / state, self._uid, self._gid)
        bounds.bound([top / state for top in self._node.tops], self._node.bounds)
        self.state = state
        return {}, []

    def _adopt(self, sandbox: str, process: int) -> _Answer:
        adoption.checked_pid(process, self._uid)
        if (first := self._node.ranges.draw()) is None:
            raise Refused("full", "no range of ids is left for this user, or on this machine")
        self.ids[sandbox] = first
        for kind, own in (("uid_map", self._uid), ("gid_map", self._gid)):  # inside, the user is 0
            groups.write(Path(f"/proc/self/fd/{process}", kind), f"0 {own} 1\n1 {first} {NUM_IDS}\n")
        return {"first": first}, []

    def _join(self, sandbox: str, process: int) -> _Answer:
        pid, top = str(adoption.checked_pid(process, self._uid)), self._node.tops[0]
        groups.write(top / self.state / sandbox / "cgroup.procs", pid)
        try:
            adoption.checked_pid(process, self._uid)
        except OSError:  # it has ended, and another that has its pid now may have been moved
            groups.write(top.parent / "cgroup.procs", pid)
            raise
        return {}, []

    def _link(self, sandbox: str, namespace: int) -> _Answer:
        adoption.check_network(namespace, self._uid)
        self._programs = self._programs or Programs(self._node.file, self._node.denials)
        place = self._node.tops[0] / self.state / sandbox
        group = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._programs.guard(group)
        finally:
            os.close(group)
        self._links[sandbox], ifindex, number = self._programs.make_link(namespace)
        return {"ifindex": ifindex, "number": number}, [self._programs.map(each) for each in _MAPS]

    def _release(self, sandbox: str) -> _Answer:
        if sandbox in self._links:
            remove_link(self._links.pop(sandbox))
        if (first := self.ids.pop(sandbox, None)) is not None:
            self._node.ranges.give_back([first])
        return {"first": first}, []


class Node:
    """All connections of one user."""

    def __init__(
        self, listener: socket.socket, uid: int, file: str, ranges: Ranges, bounds: dict[str, str]
    ) -> None:
        self._listener, self.uid, self.file, self._addresses = listener, uid, file, Addresses()
        self.denials = denials.entries(self._addresses.current())
        self.tops = groups.find_tops(Path("/proc/mounts").read_text())
        self.callers: list[Caller] = []
        self.ranges, self.bounds, self._resting = ranges, bounds, list[int]()
        # What a helper that was killed has left: nobody knows any more whose ids are in use.
        self._doomed = [place for top in self.tops for place in top.glob(f"u{uid}x*")]

    def serve(self) -> None:
        """Until a signal; then all ends that was made."""
        try:
            while True:
                wait_s = 0.01 if self._bury() else None
                watched = [self._addresses, self._listener, *self.callers]
                for ready in select.select(watched, [], [], wait_s)[0]:
                    if ready is self._addresses:
                        self._deny()
                    elif isinstance(ready, Caller):
                        if not ready.serve():
                            self._end(ready)
                    elif len(self.callers) < _MOST_CALLERS:
                        self.callers.append(Caller(self._listener.accept()[0], self))
                    else:
                        self._listener.accept()[0].close()
        finally:
            for caller in list(self.callers):
                self._end(caller)
            self.settle()

    def _deny(self) -> None:
        """What is this machine's now. OSError, with which the helper and all that it has made ends."""
        self.denials = denials.entries(self._addresses.current())
        for caller in self.callers:
            caller.deny()

    def settle(self) -> None:
        """Until nothing is left of those who are gone; what the kernel holds on to is let be."""
        for _ in filter(lambda _: self._bury(), range(_ATTEMPTS)):
            select.select([], [], [], 0.005)

    def _bury(self) -> bool:
        self._doomed = [place for place in self._doomed if groups.bury(place)]
        if not self._doomed:
            self.ranges.give_back(self._resting)
            self._resting = []
        return bool(self._doomed)

    def _end(self, caller: Caller) -> None:
        self.callers.remove(caller)
        places = caller.end()
        self._resting += caller.ids.values()  # until those who may be in them have ended
        if caller.state and all(each.state != caller.state for each in self.callers):
            places = [top / caller.state for top in self.tops]
        self._doomed += places
