"""Connections, one request at a time: a packet of JSON with a verb and a name, and a descriptor for some."""

import errno
import json
import os
import re
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path

from sandbox.privileged import adoption, bounds, denials, groups
from sandbox.privileged.addresses import Addresses
from sandbox.privileged.adoption import Refused
from sandbox.privileged.networks import Programs
from sandbox.privileged.ranges import NUM_IDS, Ranges

_MOST_CALLERS, _MOST_SANDBOXES, _MOST_BYTES, _ATTEMPTS, _LINKS_AT_ONCE = 8, 4096, 512, 2000, 4
_MAPS = ("allowed", "attached", "counts", "events", "links")
_Answer = tuple[dict[str, object], list[int]]


class Caller:
    """One connection, and all that was made for it."""

    def __init__(self, connection: socket.socket, node: "Node") -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
        _, self._uid, self._gid = struct.unpack("=iII", peer)
        connection.setblocking(False)  # the flags of send_fds and recv_fds have no effect
        self.connection, self._node, self.fileno, self.state = connection, node, connection.fileno, ""
        self.ids, self._links = dict[str, int](), dict[str, str]()  # of each sandbox the first, and its own
        self.programs: Programs | None = None

    def serve(self) -> bool:
        """One request. False when there will be no more."""
        data, fds, flags, given, self._number = b"", list[int](), 0, list[int](), None
        try:
            data, fds, flags, _ = socket.recv_fds(self.connection, _MOST_BYTES + 1, 2)
            reply, given = self._answer(data, fds)
        except Exception as error:  # whatever a record makes of us, the next one is served
            name, words = error.args if isinstance(error, Refused) else ("failed", str(error))
            number = errno.EMFILE if flags & socket.MSG_CTRUNC else getattr(error, "errno", None)
            reply = {"refused": name, "words": words[:_MOST_BYTES], "errno": number}
        finally:
            for fd in fds:
                os.close(fd)
        said = json.dumps(reply | {"request": self._number}).encode()
        with suppress(OSError):  # it does not read, or is gone
            return bool(data and socket.send_fds(self.connection, [said], given))
        return False

    def cut(self) -> bool:
        """Removes a few links, which take 20 ms each, and then lets go. Whether there were some. OSError."""
        left = {name for _, name in socket.if_nameindex()}.intersection(self._links.values())
        if self.programs and left:
            self.programs.remove_links(*[*left][:_LINKS_AT_ONCE])
        elif self.programs:
            programs, self.programs = self.programs, None  # a signal may come behind it: never twice
            programs.close()
        return bool(left)

    def _answer(self, data: bytes, fds: list[int]) -> _Answer:
        if self._uid != self._node.uid:
            raise Refused("foreign", f"this helper serves uid {self._node.uid}, not uid {self._uid}")
        verbs = {"open0": self._open, "adopt1": self._adopt, "join1": self._join, "link1": self._link}
        try:
            verb, name, self._number = json.loads(data if len(data) <= _MOST_BYTES else b"")
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
            raise Refused("full", "with bounds a user has one state directory at a time")
        if self._node.bury(state):  # on which no other request waits
            raise Refused("busy", "what another owner of this state has left has not ended yet")
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
        self.programs = self.programs or Programs(self._node.file, self._node.denials)
        group = os.open(self._node.tops[0] / self.state / sandbox, os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self.programs.guard(group)
        finally:
            os.close(group)
        self._links[sandbox], ifindex, number = self.programs.make_link(namespace)
        return {"ifindex": ifindex, "number": number}, [self.programs.map(each) for each in _MAPS]

    def _release(self, sandbox: str) -> _Answer:
        if self.programs and sandbox in self._links:
            self.programs.remove_links(self._links.pop(sandbox))
        if (first := self.ids.pop(sandbox, None)) is not None:
            self._node.doomed.append(([top / self.state / sandbox for top in self._node.tops], [first]))
        return {"first": first}, []


class Node:
    """All connections of one user."""

    def __init__(
        self, listener: socket.socket, uid: int, file: str, ranges: Ranges, bounds: dict[str, str]
    ) -> None:
        self._listener, self.uid, self.file, self._addresses = listener, uid, file, Addresses()
        self.ranges, self.bounds, self.denials = ranges, bounds, denials.entries(self._addresses.current())
        self.tops = groups.find_tops(Path("/proc/mounts").read_text())
        self.callers, self._leaving = list[Caller](), list[Caller]()  # of these links may be there yet
        # Folders, and ids that rest until these are gone. At first what a killed helper has left.
        self.doomed = [([place for top in self.tops for place in top.glob(f"u{uid}x*")], ranges.own)]

    def serve(self) -> None:
        """Until a signal; then all ends that was made."""
        try:
            while True:
                wait = 0.01 if self.bury() | self._cut() else None
                for ready in select.select([self._addresses, self._listener, *self.callers], [], [], wait)[0]:
                    if ready is self._addresses:
                        self._deny()
                    elif isinstance(ready, Caller):
                        if not ready.serve():
                            self._end(ready)
                    else:
                        try:
                            self.callers.append(Caller(self._listener.accept()[0], self))
                            for one_too_many in self.callers[_MOST_CALLERS:]:
                                self._end(one_too_many)
                        except OSError:  # no descriptor is free: he waits, and others are served meanwhile
                            select.select([], [], [], 0.01)
        finally:
            for caller in list(self.callers):
                self._end(caller)
            self.settle()

    def _deny(self) -> None:
        """What is this machine's now. OSError, with which the helper and all that it has made ends."""
        self.denials = denials.entries(self._addresses.current())
        for programs in [each.programs for each in self.callers + self._leaving if each.programs]:
            programs.deny(self.denials)

    def settle(self) -> None:
        """Until nothing is left of those who are gone."""
        for _ in filter(lambda _: self.bury() | self._cut(), range(_ATTEMPTS)):
            select.select([], [], [], 0.005)

    def bury(self, state: str = "") -> bool:
        """What the kernel lets go of now. Whether something is left, or of a state's folders."""
        doomed = [([each for each in places if groups.bury(each)], firsts) for places, firsts in self.doomed]
        self.ranges.give_back(first for places, firsts in doomed if not places for first in firsts)
        self.doomed = [each for each in doomed if each[0]]
        return any(place.name.startswith(state) for places, _ in self.doomed for place in places)

    def _cut(self) -> bool:
        with suppress(OSError):  # then the next time
            self._leaving = [each for at, each in enumerate(self._leaving) if at or each.cut()]
        return bool(self._leaving)

    def _end(self, caller: Caller) -> None:
        is_last = caller.state and all(each is caller or each.state != caller.state for each in self.callers)
        names = [""] if is_last else [*caller.ids]  # of his state's folders, or of his sandboxes'
        places = [top / caller.state / name for top in self.tops for name in names]
        self.doomed.append((places, [*caller.ids.values()]))
        self._leaving.append(caller)
        caller.connection.close()
        self.callers.remove(caller)  # last: behind a signal it is all done again
