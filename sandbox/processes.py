"""Processes told apart for good: a pid alone may be someone else's by now, a pid with its start time not."""

import errno
import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sandbox.kernel_files import read_small

_STATE, _NUM_THREADS, _START_TIME = 0, 17, 19  # fields of /proc/PID/stat, counted after the name


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process of this boot: pid and start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """True while this very process runs; a zombie is not alive, unless only its first thread is one."""
        fields = _stat_fields(self.pid)
        if fields is None or int(fields[_START_TIME]) != self.start_ticks:
            return False
        return fields[_STATE] != "Z" or int(fields[_NUM_THREADS]) > 1

    def open(self, name: str, flags: int) -> int:
        """A descriptor of /proc/PID/`name` of this very process, the caller's. ProcessLookupError where it
        has ended, whoever has its pid now."""
        try:
            fd = os.open(f"/proc/{self.pid}/{name}", flags | os.O_CLOEXEC)
        except FileNotFoundError:
            self._check_alive()
            raise
        try:
            self._check_alive()  # so it was alive when that was opened, and nobody else had its pid
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_alive(self) -> None:
        if not self.is_alive():
            raise ProcessLookupError(errno.ESRCH, f"process {self.pid} has ended")

    def ends_within(self, patience_s: float) -> bool:
        """Whether it has ended by then. Blocks. One that is killed closes its files, of which others hear,
        moments before it is no more."""
        with suppress(OSError):  # it has ended, or there is no descriptor to wait by
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive():  # so the handle is its own
                    ended = select.poll()
                    ended.register(handle, select.POLLIN)
                    ended.poll(1000 * patience_s)
            finally:
                os.close(handle)
        with suppress(OSError):  # there is none to look by either: nobody knows that it has ended
            return not self.is_alive()
        return False

    def kill(self) -> bool:
        """SIGKILL without a race against reuse of the pid. False when it is gone already."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The handle pins the process, so this check holds until the signal is sent.
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(handle)
        return True


NOBODY = ProcessKey(0, 0)
"""No process ever: pid 0 is the kernel's."""


def find_process(pid: int) -> ProcessKey | None:
    """The process that has `pid` now, None when there is none."""
    fields = _stat_fields(pid)
    return None if fields is None else ProcessKey(pid, int(fields[_START_TIME]))


def is_wholly(key: ProcessKey, user: int) -> bool:
    """Whether all of a process's user ids are this one. False when it is gone already."""
    try:
        lines = read_small(f"/proc/{key.pid}/status").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    ids = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
    return set(ids) == {str(user)} and key.is_alive()


def this_process() -> ProcessKey:
    """The calling process."""
    return _living_process(os.getpid())


@cache
def _living_process(pid: int) -> ProcessKey:
    key = find_process(pid)
    assert key is not None, "/proc does not show this process"
    return key


@cache
def boot_id() -> str:
    """Changes with every boot, after which no recorded pid means anything."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def command_lines() -> Iterator[tuple[int, list[bytes]]]:
    """Pid and arguments of every process that this user may see. A process that ends meanwhile is left
    out."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        if (arguments := command_line(int(entry.name))) is not None:
            yield int(entry.name), arguments


def command_line(pid: int) -> list[bytes] | None:
    """Of the process that has `pid` now; None where there is none, or this user may not see it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = read_small(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()
