"""An ordinary user's connection to the helper that root runs for him (sandbox/privileged): cgroups, ids and
networks for his sandboxes. What it gives goes when the connection ends, however this process ends."""

import errno
import json
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import cgroups
from sandbox.errors import CapacityError, StartError, error_of, is_shortage, translated
from sandbox.forks import free
from sandbox.passed import receive
from sandbox.places import helper_socket

_PATIENCE_S = 30.0  # a link of each other process of this user's may come first
_RETRY_S = 0.01  # for a place among those who wait for it
_LATE_PATIENCE_S = 0.1  # of who tells one that has not answered what to give back
_MOST_OPENINGS, _MOMENT_S = 200, 0.05  # while what another owner of the state has left ends
_MOST_BYTES = 2048
_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_MAPS = ("allowed", "attached", "counts", "events", "links")


@dataclass(frozen=True, slots=True)
class Linked:
    """A link's host end, the number of its addresses in the pools, and descriptors of the maps of its fence,
    which are the receiver's."""

    ifindex: int
    number: int
    maps: dict[str, int]


class Helper:
    """One connection, for one state directory. Thread-safe; each request blocks for its answer. What comes
    too late is nobody's answer, and what was asked for is done all the same: `release` undoes it. Who has
    waited behind a request without an answer is told the same, at once."""

    def __init__(self, connection: socket.socket, state: str) -> None:
        self._connection, self._state = connection, state
        self._lock = threading.Lock()  # one request at a time
        self._number = 0  # of the last one
        self._late = 0  # the last one, where it has had no answer
        try:
            self._open()
        except BaseException:
            connection.close()
            raise

    def hierarchies(self) -> tuple[cgroups.Hierarchy, ...]:
        """Trees of cgroups in which this user may make groups of this state. StartError, CapacityError."""
        below = f"{cgroups.TOP}/{self._state}"
        found = cgroups.find_hierarchies(below=below)
        if len(found) < len(cgroups.counting_roots()):  # a sweep took folders while they were empty
            self._open()
            found = cgroups.find_hierarchies(below=below)
        return found

    def join(self, sandbox_id: str, pid: int) -> None:
        """Puts a process, as `adopt` takes it, into the sandbox's group of version 2, for which the kernel
        mostly waits some milliseconds. StartError."""
        self._ask_about("join", sandbox_id, f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)

    def adopt(self, sandbox_id: str, pid: int) -> None:
        """Gives a process's user namespace, which this user has made and which has none, ids for a sandbox: 0
        is this user, 1 to 65,536 are nobody else's. StartError, CapacityError."""
        self._ask_about("adopt", sandbox_id, f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)

    def link(self, sandbox_id: str, pid: int) -> Linked:
        """Fences the sandbox's cgroup and gives the network namespace of a process a link, through which
        nothing passes yet. StartError, CapacityError."""
        namespace = _opened(f"/proc/{pid}/ns/net", os.O_RDONLY, sandbox_id)
        try:
            said, fds = self._ask("link", sandbox_id, namespace)
        finally:
            os.close(namespace)
        return Linked(said["ifindex"], said["number"], dict(zip(_MAPS, fds, strict=True)))

    def release(self, sandbox_id: str) -> None:
        """Gives back what is the sandbox's. Nothing there, or nobody there any more, is no error; behind a
        request without an answer it is sent, and not waited for."""
        with suppress(StartError, CapacityError):
            self._ask("release", sandbox_id)

    def has_ended(self) -> bool:
        """Whether the other end has gone, or this one is closed: for any thread, also while another waits for
        an answer. Does not block."""
        fd = self._connection.fileno()
        if fd < 0:
            return True
        ears = select.poll()
        ears.register(fd, 0)
        return any(event & select.POLLHUP for _, event in ears.poll(0))

    def close(self) -> None:
        """Whatever was made through it ends."""
        with self._lock:
            self._connection.close()

    def leave(self) -> None:
        """In a child of a fork, whose parent goes on with the connection."""
        self._lock = threading.Lock()
        self._connection.close()

    def _open(self) -> None:
        """Others are served between the attempts, while what another owner of the state has left ends."""
        said = dict[str, Any]()
        for _ in range(_MOST_OPENINGS):
            said, _ = self._exchange("open", self._state)
            if said.get("refused") != "busy":
                break
            time.sleep(_MOMENT_S)
        _check(said, self._state)

    def _ask_about(self, verb: str, name: str, path: str, flags: int) -> None:
        fd = _opened(path, flags, name)
        try:
            self._ask(verb, name, fd)
        finally:
            os.close(fd)

    def _ask(self, verb: str, name: str, *fds: int) -> tuple[dict[str, Any], list[int]]:
        said, given = self._exchange(verb, name, *fds)
        _check(said, name)
        return said, given

    def _exchange(self, verb: str, name: str, *fds: int) -> tuple[dict[str, Any], list[int]]:
        late, is_release = self._late, verb == "release"
        with self._lock:
            try:
                if self._late not in (0, late) and not is_release:
                    raise TimeoutError("timed out")
                self._number += 1
                self._connection.settimeout(_LATE_PATIENCE_S if self._late and is_release else _PATIENCE_S)
                record = json.dumps([verb, name, self._number]).encode()
                # Not socket.send_fds, which ignores its flags.
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
                self._connection.sendmsg([record], [rights], socket.MSG_NOSIGNAL)
                heard = self._hear(self._number)
            except OSError as error:
                self._late = self._number if isinstance(error, TimeoutError) else 0
                raise _failed(f"the helper does not answer: {error}", name, error.errno) from error
            self._late = 0
        return heard

    def _hear(self, number: int) -> tuple[dict[str, Any], list[int]]:
        """The answer to that request, behind those that came too late for others."""
        while True:
            data, given, is_cut = receive(self._connection, _MOST_BYTES, num_fds=len(_MAPS))
            if not data:
                raise ConnectionResetError("it has ended, or serves as many processes as it can")
            said: dict[str, Any] = json.loads(data)
            is_late = said["request"] != number
            if not (is_late or is_cut):
                return said, given
            for fd in given:
                os.close(fd)
            if not is_late:
                raise OSError(errno.EMFILE, "no descriptor is free for what it gives")


def shared_helper(state_dir: Path) -> Helper | None:
    """The connection of this process for this state directory, made at the first use and again when it has
    ended. None for root, who needs none, and for a user whom no helper serves. StartError where it
    refuses."""
    return None if os.geteuid() == 0 else _way(state_dir).helper()


@contextmanager
def asked_once(state_dir: Path) -> Generator[None]:
    """For whoever tries many things of a state directory: an attempt that fails in the block is the last in
    it, of all threads, and its error is that of those who ask after it."""
    way, token = _way(state_dir), object()
    way.asked_once[token] = way.failure
    try:
        yield
    finally:
        del way.asked_once[token]


class _Way:
    """To the helper, for one state directory. One thread at a time tries it, which may take long; those who
    have waited meanwhile get its helper, or its error."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._lock = threading.Lock()  # guards what follows
        self._helper: Helper | None = None
        self.failure: dict[str, Any] | None = None  # of the last attempt that failed, its error's record
        self.asked_once = dict[object, dict[str, Any] | None]()  # what that was before each such block

    def helper(self) -> Helper | None:
        """As `shared_helper`."""
        known = self.failure
        with self._lock:
            if self._helper is not None and self._helper.has_ended():
                self._helper.close()
                self._helper = None
            if self._helper is None:
                is_new = any(self.failure is not each for each in (known, *self.asked_once.values()))
                if self.failure is not None and is_new:
                    raise error_of(self.failure)
                try:
                    connection = _connect(helper_socket())
                    self._helper = connection and Helper(connection, self._state)
                except (StartError, CapacityError) as error:
                    self.failure = error.record()
                    raise
            return self._helper

    def leave(self) -> None:
        """In a child of a fork."""
        if self._helper is not None:
            self._helper.leave()


_ways: dict[str, _Way] = {}
_lock = threading.Lock()  # guards it


def _way(state_dir: Path) -> _Way:
    state = cgroups.state_key(state_dir)
    with _lock:
        return _ways.setdefault(state, _Way(state))


def _leave() -> None:
    """In a child of a fork: what the helper has given is its parent's, and goes with that."""
    free(_lock)
    for way in _ways.values():
        way.leave()
    _ways.clear()


os.register_at_fork(after_in_child=_leave)


def hierarchies_of(state_dir: Path) -> tuple[cgroups.Hierarchy, ...]:
    """Trees of cgroups in which this process may make groups for sandboxes of this state directory."""
    helper = shared_helper(state_dir)
    return cgroups.find_hierarchies() if helper is None else helper.hierarchies()


def _connect(place: Path) -> socket.socket | None:
    """None where nobody listens, or it is not root who does. CapacityError where no descriptor is free, or
    too many wait for it: Linux refuses with EAGAIN whoever has a bound to his patience."""
    give_up_s = time.monotonic() + _PATIENCE_S
    with translated("asking the helper"), ExitStack() as on_failure:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        on_failure.callback(connection.close)
        connection.settimeout(_PATIENCE_S)
        while True:
            try:
                connection.connect(str(place))
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up_s:
                    raise CapacityError("too many wait for the helper", hint="try again") from error
                time.sleep(_RETRY_S)
            except OSError as error:
                if is_shortage(error):
                    raise
                return None
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != 0:
            return None
        on_failure.pop_all()
        return connection


def _opened(path: str, flags: int, name: str) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise _failed(f"{path}: {error.strerror}", name, error.errno) from error


def _check(said: dict[str, Any], name: str) -> None:
    """That it is no refusal."""
    if (refused := said.get("refused")) is None:
        return
    if refused in ("full", "busy"):
        raise CapacityError(f"helper: {said['words']}", hint="end other sandboxes", sandbox_id=name)
    raise _failed(f"helper: {refused}: {said['words']}", name, said.get("errno"))


def _failed(words: str, name: str, number: int | None) -> StartError | CapacityError:
    """`number`: an errno, of us or of the helper."""
    if is_shortage(OSError(number, "")):
        hint = "close or end something, or raise the limit (`ulimit -n`), and try again"
        return CapacityError(words, hint=hint, sandbox_id=name)
    hint = "see what `dockyard node helper`, which root has started, says"
    return StartError(words, phase="privilege", hint=hint, sandbox_id=name)
