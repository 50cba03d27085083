"""Carries a LaunchPlan out: from a plan to a running init that has said hello."""

import os
import signal
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from sandbox.errors import CapacityError, StartError, is_shortage
from sandbox.forks import close_in_children
from sandbox.memory_files import memory_file
from sandbox.nursery import Launcher, shared_nursery
from sandbox.passed import receive
from sandbox.processes import ProcessKey, find_process
from sandbox.sealed import sealed_copy
from sandbox.substrates.base import LaunchPlan
from sandbox.texts import one_line
from sandbox.wire import FRAME_BYTES, WIRE_VERSION, Kind, decode

HELLO_PATIENCE_S = 20.0
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_FAILURE_BYTES = 4096
_END_PATIENCE_S = 5.0


class Adopter(Protocol):
    """Who does with privilege what a launcher in a user namespace of its own cannot. Each raises a
    SandboxError."""

    def adopt(self, pid: int) -> None:
        """Gives its user namespace ids."""
        ...

    def join(self, pid: int, resolver: socket.socket | None) -> None:
        """Puts it into cgroups of version 2, and gives its network a link, where there is to be one: with a
        socket of that, for a resolver, which is the adopter's unless this raises; where it does, it may be
        closed already. The launcher mounts meanwhile, and starts nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A running sandbox. The receiver owns the processes and the socket."""

    launcher: Launcher
    control: socket.socket
    init_pid: int  # on the host
    open_layer: Callable[[], int]  # a descriptor of what its layer holds, the caller's; OSError
    pids: tuple[int, ...]  # of what stays: init, and before it whatever launch has become, if that does
    stays: ProcessKey | None  # that one


@dataclass(frozen=True, slots=True)
class Handed:
    """Descriptors of what launch does not make itself; they stay the caller's."""

    network: int | None = None  # namespace that it enters; None: it makes one with nothing but a loopback
    linked: bool = False  # in which whoever adopts it puts a link
    layer: int | None = None  # mount of the writable layer; None: it mounts a tmpfs
    content: int | None = None  # directory with what the layer holds at first; None: nothing
    content_ids: int = 0  # the first id in it

    def words(self) -> list[str]:
        """As options of launch."""
        words = [] if self.network is not None else ["--linked" if self.linked else "--no-network"]
        return [*words, "--content-ids", str(self.content_ids)]

    def fds(self) -> dict[str, int]:
        """All that there are, by their options."""
        found = {"--network": self.network, "--layer": self.layer, "--content": self.content}
        return {option: fd for option, fd in found.items() if fd is not None}


def launch(
    init: Path,
    plan: LaunchPlan,
    *,
    sandbox_id: str,
    handed: Handed,
    meanwhile: Callable[[], None],
    adopter: Adopter | None = None,
    patience_s: float = HELLO_PATIENCE_S,
) -> Launched:
    """Starts it, calls `meanwhile` and `adopter`, and waits for init's hello. Blocks for milliseconds, and as
    long as its content takes to copy; `patience_s` at most.

    Raises StartError with the launcher's own words when it does not come up, CapacityError where the host is
    out of what the process that starts it takes, and then leaves nothing running.
    """
    with ExitStack() as on_failure:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        on_failure.callback(ours.close)
        close_in_children(ours)  # also while it is being made: see `forks`
        close_in_children(theirs)
        # Before anything is sent: the kernel adds the sender's pid only for one who has asked already.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        adoption = None if adopter is None else _Adoption(adopter)
        with theirs, adoption or nullcontext(), _memory_file(b"") as errors:
            try:
                launcher = _start(
                    init, plan, sandbox_id=sandbox_id, handed=handed, given={"--control": theirs.fileno()},
                    errors=errors, adoption=adoption,
                )  # fmt: skip
            except OSError as error:
                raise _start_error(sandbox_id, "", error) from error
            theirs.close()  # or the stream would not end with the sandbox
            on_failure.callback(_end, launcher)
            meanwhile()
            try:
                if adoption is not None:
                    adoption.serve(launcher.pid, patience_s)
                init_pid = _await_hello(ours, patience_s)
                launched = _settle(launcher, plan, ours, init_pid)
            except (OSError, ValueError) as error:
                _end(launcher)
                raise _start_error(sandbox_id, _read_failure(errors), error) from error
        on_failure.pop_all()
    return launched


def _settle(launcher: Launcher, plan: LaunchPlan, control: socket.socket, init_pid: int) -> Launched:
    """A runtime has nothing more to do: it goes, or what stays in its place ends it. OSError."""
    if not plan.stays:
        if not launcher.settle(signal.SIGKILL, init_pid):
            raise OSError("its launcher has not handed its layer in")
        return Launched(launcher, control, init_pid, launcher.open_layer, (init_pid,), None)
    if (stays := find_process(launcher.pid)) is None:
        raise OSError("its launcher has ended")
    launcher.settle(signal.SIGUSR1 if plan.is_detached else 0)
    open_layer = partial(stays.open, plan.layer_at, os.O_RDONLY | os.O_DIRECTORY)
    return Launched(launcher, control, init_pid, open_layer, (launcher.pid, init_pid), stays)


class _Adoption:
    """The socket on which a launcher in a user namespace of its own asks for ids. A context manager."""

    def __init__(self, adopter: Adopter) -> None:
        self._adopter = adopter
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()

    def fds(self) -> dict[str, int]:
        """What is handed over, by its option."""
        return {"--adopter": self._theirs.fileno()}

    def serve(self, pid: int, patience_s: float) -> None:
        """Waits until it asks, lets it go on once it has ids, and to the end once it is in its cgroups.
        ValueError, OSError, and what adopting raises."""
        self._theirs.close()
        self._ours.settimeout(patience_s)
        data, fds, is_cut = receive(self._ours, FRAME_BYTES + 1)
        if is_cut:  # or it would have no network, without a word
            hint = "close something, or raise the limit (`ulimit -n`), and try again"
            raise CapacityError("no descriptor is free for a sandbox's resolver", hint=hint)
        if not data:
            raise ValueError("its launcher ended before it had ids")
        with ExitStack() as unless_taken:
            resolver = unless_taken.enter_context(socket.socket(fileno=fds[0])) if fds else None
            self._adopter.adopt(pid)
            self._ours.send(b"\0")
            self._adopter.join(pid, resolver)
            unless_taken.pop_all()
        self._ours.send(b"\0")


def _start(
    init: Path,
    plan: LaunchPlan,
    *,
    sandbox_id: str,
    handed: Handed,
    given: dict[str, int],
    errors: int,
    adoption: "_Adoption | None",
) -> Launcher:
    with ExitStack() as files:
        given |= handed.fds() | (adoption.fds() if adoption is not None else {})
        if plan.oci_config is not None:
            given["--config"] = files.enter_context(_memory_file(plan.oci_config.encode()))
        if plan.filter_program is not None:
            given["--filter"] = files.enter_context(_memory_file(plan.filter_program))
        if plan.is_sealed and (program := sealed_copy(plan.program[0])) is not None:
            given["--program"] = program
        group = None if plan.born_in is None else os.open(plan.born_in, os.O_PATH | os.O_CLOEXEC)
        if group is not None:
            files.callback(os.close, group)
        options = [word for place, option in enumerate(given, 1) for word in (option, str(place))]
        words = [*options, *plan.options, *handed.words(), "--", *plan.program]
        return shared_nursery(init).start(sandbox_id, words, (errors, *given.values()), group)


def _await_hello(control: socket.socket, patience_s: float) -> int:
    """Init's pid on this host, vouched for by the kernel, which translates it between pid namespaces."""
    control.settimeout(patience_s)
    size = socket.CMSG_SPACE(_CREDENTIALS.size)
    data, ancillary, _, _ = control.recvmsg(FRAME_BYTES + 1, size)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    control.settimeout(None)
    if not data:
        raise ValueError("its first process ended before it was ready")
    hello = decode(data, [])
    if hello.kind != Kind.HELLO or hello.first != WIRE_VERSION:
        raise ValueError("dockyard-init is of another version; build it again")
    pid, _, _ = _CREDENTIALS.unpack(ancillary[0][2])
    if pid <= 0:
        raise ValueError("the kernel does not say which process it is")
    return pid


def _start_error(sandbox_id: str, words: str, error: OSError | ValueError) -> StartError | CapacityError:
    """`words`: what the sandbox's own side says of it, if anything."""
    if not words and isinstance(error, OSError) and is_shortage(error):
        hint = "close or end something, or raise the limit (`ulimit -n`, `ulimit -u`), and try again"
        return CapacityError(f"sandbox {sandbox_id} did not start: {error}", hint=hint, sandbox_id=sandbox_id)
    return StartError(
        f"sandbox {sandbox_id} did not start: {words or error}",
        phase="launch",
        hint="`dockyard doctor` says what this host lacks",
        sandbox_id=sandbox_id,
    )


def _end(launcher: Launcher) -> None:
    launcher.kill()
    with suppress(TimeoutError):
        launcher.wait(_END_PATIENCE_S)


def _read_failure(errors: int) -> str:
    return one_line(os.pread(errors, _FAILURE_BYTES, 0).decode("utf-8", "replace"))


@contextmanager
def _memory_file(content: bytes) -> Generator[int]:
    fd = memory_file(content)
    try:
        yield fd
    finally:
        os.close(fd)
