"""How other processes of the same user reach the sandboxes of an owner: they ask it, and it answers.

The owner alone holds its sandboxes' control sockets. One socket and one thread of the whole process wait for
all others, and a thread more serves each that has come. It is an abstract Unix socket, so nothing of it lies
in a file system or is left by a process that is killed. The kernel vouches for both ends: the owner answers
root and its own user, and whoever asks makes sure that it has the process of the journal before it, not one
that has taken its name. An owner whose name is taken goes by another, which is found among its descriptors.
One request a connection, a line of JSON each way; before the answer come lines of a command's output, where
it is asked for.
"""

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

from protocol.threads import NoThread, TimelyThread, tell_error
from sandbox.door_names import name_of, other_names, take_name
from sandbox.errors import (
    AuthError,
    CapacityError,
    InvalidArgument,
    SandboxError,
    SandboxGone,
    UnsupportedError,
    error_of,
    telling_shortage,
)
from sandbox.forks import close_in_children
from sandbox.processes import ProcessKey, this_process

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
PATIENCE_S = 10.0  # a kill may take as long as the kernel holds on to a cgroup
_BEAT_S = 5.0  # between signs of life, for whoever waits for an answer
_FINISH_S = 2.0  # at the end of this process, for answers that are under way
_REQUEST_PATIENCE_S = 2.0  # for a request, so that nobody keeps others waiting
_END_PATIENCE_S = 0.5  # for an owner that hangs up, until it has ended if it was killed
_MAX_REQUEST_BYTES, _MAX_ANSWER_BYTES = 1 << 25, 1 << 26
_BACKLOG, _AGAIN_S, _MOST_AT_ONCE = 64, 0.1, 128
_RETRY_S = 0.01  # for a place in the backlog
_BRIEF = frozenset({"list", "info"})  # nothing is waited for: a sign of life is no reason to go on
_TOO_LARGE = InvalidArgument(
    f"the answer has more than {_MAX_ANSWER_BYTES >> 20} MiB", hint="ask for less, or in the owner's process"
)

T = TypeVar("T")
Request = Mapping[str, Any]
HasLeft = Callable[[], bool]  # whoever asked
Tell = Callable[[object], None]  # something before the answer, in values of JSON
Answer = Callable[[Request, HasLeft, Tell], Any]  # in values of JSON; raises SandboxError


class Door:
    """Of this process. Thread-safe."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._lock = threading.Lock()  # guards what follows
        self._opened_by: ProcessKey | None = None
        self._listener: socket.socket | None = None
        self._room = _Room(_MOST_AT_ONCE)

    def open(self) -> bool:
        """The first time in a process: others are answered from now on, until it ends. False where the host
        lacks descriptors or threads: sandboxes are not the worse for it, and the next call tries again."""
        with self._lock:
            if self._opened_by == (owner := this_process()):
                return True
            with suppress(OSError, NoThread):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    take_name(listener, owner)
                    listener.listen(_BACKLOG)
                    TimelyThread(partial(self._serve, listener), name="dockyard-door").start()
                except BaseException:
                    listener.close()
                    raise
                self._opened_by, self._listener = owner, listener
            return self._opened_by == owner

    def finish(self) -> None:
        """At this process's end: waits, seconds at most, until all who have asked have their answers, such as
        that the sandbox is killed, upon which its owner ends."""
        self._room.wait(_FINISH_S)

    def leave(self) -> None:
        """In a child of a fork: the door is its parent's. Nobody else calls it."""
        self._lock = threading.Lock()  # which another thread of the parent may have held
        self._room = _Room(_MOST_AT_ONCE)
        if self._listener is not None:
            self._listener.close()
        self._opened_by = self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = listener.accept()[0]
                with suppress(OSError):  # it has hung up, as anybody may without end: no others wait for that
                    self._let_in(connection)
            except (OSError, MemoryError):  # for want of a descriptor, or memory: whoever asks may ask again
                time.sleep(_AGAIN_S)
            except Exception:
                tell_error()
                time.sleep(_AGAIN_S)

    def _let_in(self, connection: socket.socket) -> None:
        with ExitStack() as on_failure:
            on_failure.callback(connection.close)
            close_in_children(connection)
            connection.settimeout(_REQUEST_PATIENCE_S)
            try:
                _check_peer(connection)
                self._room.take(connection, self._talk)
                on_failure.pop_all()  # it is closed there
            except SandboxError as error:
                connection.sendall(_packed({"error": error.record()}))

    def _talk(self, connection: socket.socket) -> None:
        """On a thread of the connection's."""
        with connection, suppress(OSError, ValueError):
            caller = _Caller(connection)
            answer = _packed(self._answered(connection, caller))
            if len(answer) > _MAX_ANSWER_BYTES:
                answer = _packed({"error": _TOO_LARGE.record()})
            # Whoever reads a command's output as it comes may be as slow with the last of it.
            connection.settimeout(None if caller.was_told else PATIENCE_S)
            connection.sendall(answer)

    def _answered(self, connection: socket.socket, caller: "_Caller") -> dict[str, Any]:
        try:
            request = json.loads(next(_lines(connection, _MAX_REQUEST_BYTES)))
            connection.settimeout(0)
            return {"ok": self._answer(request, caller.has_left, caller.tell)}
        except SandboxError as error:
            return {"error": _with_whose(error)}
        except Exception as error:  # a request that is none; the next one is another's
            words = f"no request that is understood: {type(error).__name__}"  # and not what of it
            return {"error": SandboxError(words).record()}


class _Room:
    """For so many threads at a time."""

    def __init__(self, most: int) -> None:
        self._most, self._free = most, threading.BoundedSemaphore(most)

    def take(self, connection: socket.socket, talk: Callable[[socket.socket], None]) -> None:
        """CapacityError where there is none; the connection is then the caller's."""
        thread = TimelyThread(partial(self._run, connection, talk), name="dockyard-answer")
        if not self._free.acquire(blocking=False):
            raise CapacityError("the owner answers as many others as it can", hint="ask again")
        try:
            thread.start()
        except BaseException as error:
            if not thread.has_begun:
                self._free.release()
            if isinstance(error, NoThread):
                raise CapacityError(f"the owner has no thread left: {error}", hint="ask again") from error
            raise

    def wait(self, patience_s: float) -> None:
        """Until nobody is in it any more, for so long at most."""
        late_s = time.monotonic() + patience_s
        taken = 0
        while taken < self._most and self._free.acquire(timeout=max(0.0, late_s - time.monotonic())):
            taken += 1
        if taken:
            self._free.release(taken)

    def _run(self, connection: socket.socket, talk: Callable[[socket.socket], None]) -> None:
        try:
            talk(connection)
        finally:
            self._free.release()


class _Caller:
    """Whoever waits for an answer on a connection that does not block. As long as it is looked at, it hears
    now and then that it is not forgotten: a space, of which JSON may have any number."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._heard_s = time.monotonic()
        self._sending = threading.Lock()  # for one line at a time
        self.was_told = False

    def tell(self, piece: object) -> None:
        """A line before the answer. Blocks until it is taken, or the other end is closed."""
        self.was_told = True
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        with self._sending, suppress(OSError):  # `has_left` says so
            rest = memoryview(_packed({"piece": piece}))
            while rest:
                with suppress(BlockingIOError):
                    rest = rest[self._connection.send(rest) :]
                    continue
                writable.poll()

    def has_left(self) -> bool:
        """Whether the other end is closed."""
        try:
            if self._connection.recv(1, socket.MSG_PEEK) == b"":
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True
        if time.monotonic() - self._heard_s >= _BEAT_S and self._sending.acquire(blocking=False):
            try:
                self._heard_s = time.monotonic()
                with suppress(OSError):
                    self._connection.send(b" ")
            finally:
                self._sending.release()
        return False


def ask(owner: ProcessKey, request: Request, patience_s: float = PATIENCE_S) -> Any:
    """The owner's answer. Blocks for it; after `patience_s` in which nothing comes there is none.

    Raises what the owner raises; AuthError where it is another user's, SandboxGone where it has ended,
    CapacityError where this process has no descriptor left or too many others wait for the owner,
    UnsupportedError where it lives and does not answer: it is in another network namespace, or has no
    descriptor left.
    """
    return Call(owner, request, patience_s).ask()


class Call:
    """One question, which another thread may break off."""

    def __init__(
        self,
        owner: ProcessKey,
        request: Request,
        patience_s: float,
        take: Callable[[Any], None] | None = None,
    ) -> None:
        """`take` is given what the owner tells before its answer."""
        self._owner, self._request, self._patience_s = owner, request, patience_s
        self._take = take
        self._lock = threading.Lock()  # guards what follows
        self._connection: socket.socket | None = None
        self._is_off = False

    def ask(self) -> Any:
        """See `ask`. What `take` raises breaks it off, and is raised."""
        with closing(self._lines()) as lines:
            while "piece" in (answer := next(lines)):
                if self._take is not None:
                    self._take(answer["piece"])
        if "error" in answer:
            raise error_of(answer["error"])
        return answer.get("ok")

    def _lines(self) -> Generator[dict[str, Any]]:
        if len(packed := _packed(self._request)) > _MAX_REQUEST_BYTES:
            most = _MAX_REQUEST_BYTES >> 20
            raise InvalidArgument(
                f"what is asked takes more than {most} MiB", hint="ask in the owner's process"
            )
        try:
            with self._connected() as connection, self._held(connection):
                with suppress(BrokenPipeError):  # the answer may have come before it
                    connection.sendall(packed)
                is_brief = self._request.get("do") in _BRIEF
                until_s = time.monotonic() + self._patience_s if is_brief else inf
                yield from map(_answer_of, _lines(connection, _MAX_ANSWER_BYTES, until_s))
        except (OSError, ValueError) as error:
            if not self._is_off and self._owner.ends_within(_END_PATIENCE_S):
                raise gone_with(self._owner, str(self._request.get("id", ""))) from error
            raise _silent(self._owner, str(error) or type(error).__name__) from error

    def _connected(self) -> socket.socket:
        """Once there is room among those who wait for the owner: until then Linux refuses with EAGAIN whoever
        has a bound to his patience."""
        owner = f"process {self._owner.pid}, which owns the sandbox"
        give_up_s = time.monotonic() + self._patience_s
        with telling_shortage(f"asking {owner}"):
            while True:
                try:
                    return _connected(self._owner, self._patience_s)
                except BlockingIOError as error:
                    if self._is_off or time.monotonic() > give_up_s:
                        raise CapacityError(f"too many wait for {owner}", hint="ask again") from error
                    time.sleep(_RETRY_S)

    def break_off(self) -> None:
        """The owner sees that whoever asked has left, and no answer comes. Idempotent."""
        with self._lock:
            self._is_off = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _held(self, connection: socket.socket) -> Generator[None]:
        """Open as long as the block, whose descriptor is nobody else's meanwhile."""
        with self._lock:
            if self._is_off:
                raise ConnectionAbortedError("whoever asked has left")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


def understood(owner: ProcessKey, read: Callable[[Any], T], answer: Any) -> T:
    """What `read` makes of an owner's answer. UnsupportedError where that is nothing: any process of another
    user's may call itself an owner."""
    try:
        return read(answer)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _silent(owner, f"what it says is no answer ({type(error).__name__})") from error


def _silent(owner: ProcessKey, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"process {owner.pid}, which owns the sandbox, does not answer: {why}",
        hint="ask in that process, or end it: its sandboxes end with it",
    )


def gone_with(owner: ProcessKey, sandbox_id: str) -> SandboxGone:
    """What is said of a sandbox, or with "" of all, whose owner has ended without a word."""
    name = f"sandbox {sandbox_id}" if sandbox_id else "every sandbox"
    return SandboxGone(
        f"{name} ended with its owner, process {owner.pid}", reason="lost",
        hint="`dockyard sandbox sweep` removes what may be left of it", sandbox_id=sandbox_id,
    )  # fmt: skip


def _connected(owner: ProcessKey, patience_s: float) -> socket.socket:
    """To the owner itself. OSError where it is not to be found."""
    try:
        return _connected_to(name_of(owner), owner, patience_s)
    except OSError:
        for name in other_names(owner):
            return _connected_to(name, owner, patience_s)
        raise


def _connected_to(name: str, owner: ProcessKey, patience_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        close_in_children(connection)
        connection.settimeout(patience_s)
        connection.connect(name)
        if (pid := _peer(connection)[0]) != owner.pid:
            raise ConnectionRefusedError(f"process {pid} answers in its place")
        return connection
    except BaseException:
        connection.close()
        raise


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, of when it connected or began to listen."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def _check_peer(connection: socket.socket) -> None:
    if (uid := _peer(connection)[1]) not in (0, os.geteuid()):
        raise AuthError(f"uid {uid} is not this owner's", hint="ask as its user, or as root")


def _packed(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _with_whose(error: SandboxError) -> dict[str, Any]:
    """Its record. Whoever asks would look for a want of this process's in his own."""
    record = error.record()
    if isinstance(error, CapacityError):
        record["message"] = f"in process {os.getpid()}, which owns the sandbox: {error.message}"
    return record


def _answer_of(line: bytes) -> dict[str, Any]:
    """ValueError for what is none."""
    try:
        answer: Any = json.loads(line)
    except RecursionError:
        raise ValueError("an answer that is nested too deep") from None
    if isinstance(answer, dict):
        fields = cast(dict[str, Any], answer)
        if isinstance(fields.get("error", {}), dict):
            return fields
    raise ValueError("what it says is no answer")


def _lines(connection: socket.socket, most: int, until_s: float = inf) -> Iterator[bytes]:
    """Without end. ValueError for one beyond `most` bytes, or that breaks off; TimeoutError for what comes
    later than that."""
    data = bytearray()
    while True:
        if time.monotonic() > until_s:
            raise TimeoutError("timed out")
        piece = connection.recv(min(1 << 16, most + 1 - len(data)))
        data += piece
        if not piece or len(data) > most:
            raise ValueError("a message that has no end")
        if b"\n" in piece:
            *whole, rest = bytes(data).split(b"\n")
            yield from whole
            data = bytearray(rest)
