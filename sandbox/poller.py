"""Few threads serve all sandboxes of a process: each has a turn when something has come for it or is due.

With a thread for each, whatever walks all threads of the machine would walk these too: `pivot_root` does, at
every create.
"""

import errno
import heapq
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from protocol.threads import NoThread, TimelyThread, tell_error
from sandbox.forks import leave_in_children
from sandbox.missing_threads import shortage

_MOST_EVENTS = 64
# Always ready: to ask an epoll for it again, once, is to ring at its thread. No sandbox's own epoll has it:
# the kernel refuses a file that more than 500 nested ones watch.
_BELL = os.eventfd(1, os.EFD_CLOEXEC)
_RING = select.EPOLLIN | select.EPOLLONESHOT
_LOOK_S = 0.05  # how often it is looked whether the thread of an end is up, or memory is there again
_NUM_POLLERS = min(4, os.cpu_count() or 1)  # a sandbox that prints without end holds up those of one


class Served(Protocol):
    """What has turns. Its methods are for its poller's thread, and none but `end` may block."""

    @property
    def name(self) -> str: ...

    def fileno(self) -> int:
        """A descriptor that can be read when a turn is due; the same one until `end`."""
        ...

    def turn(self) -> bool:
        """Takes what has come, a bounded part of it; False when that was the last turn."""
        ...

    def wait_s(self) -> float | None:
        """How long until a turn is due whatever comes, None for never; asked after each turn."""
        ...

    def end(self) -> None:
        """After the last turn: on a thread of its own, or the poller's where there is none. May block."""
        ...


class Poller:
    """A thread, for as long as it has somebody to serve. Thread-safe."""

    def __init__(self) -> None:
        self._begin()
        leave_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._epoll: select.epoll | None = None
        self._thread: threading.Thread | None = None
        self._served: dict[int, _Seat] = {}
        self._rung: set[int] = set()

    @property
    def num_served(self) -> int:
        return len(self._served)

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def serve(self, served: Served) -> None:
        """From now on, with a first turn at once. OSError when the host has no thread or descriptor left."""
        fd = served.fileno()
        with self._lock:
            if self._epoll is not None:
                self._join(self._epoll, fd, served)
                return
            self._epoll = select.epoll()
            try:
                self._epoll.register(_BELL, _RING)
                self._epoll.register(fd, select.EPOLLIN)
                self._served[fd] = _Seat(served)
                self._rung.add(fd)
                work = partial(self._run, self._epoll, _Agenda(), _Ends())
                self._thread = TimelyThread(work, name="sandboxes")
                self._thread.start()
            except BaseException as error:
                self._served.clear()
                self._rung.clear()
                self._close()
                if isinstance(error, NoThread):
                    raise OSError(errno.EAGAIN, f"{error} for {served.name}") from error
                raise

    def _join(self, epoll: select.epoll, fd: int, served: Served) -> None:
        epoll.register(fd, select.EPOLLIN)
        try:
            self._served[fd] = _Seat(served)
            self._ring(fd)
        except BaseException:  # for want of memory: whoever asked takes it for not served
            self._served.pop(fd, None)
            self._rung.discard(fd)
            epoll.unregister(fd)
            raise

    def ring(self, fd: int) -> None:
        """Has whoever has that descriptor take a turn. Nothing happens when nobody has it any more."""
        with self._lock:
            if fd in self._served:
                self._ring(fd)

    def _ring(self, fd: int) -> None:
        self._rung.add(fd)
        if self._epoll is not None:
            self._epoll.modify(_BELL, _RING)

    def _take_rung(self) -> set[int]:
        with self._lock:
            rung, self._rung = self._rung, set()
            return rung

    def leave(self) -> None:
        """In a child of a fork, which has none of its parent's threads and sandboxes."""
        if self._epoll is not None:
            self._epoll.close()
        self._begin()

    def _close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._epoll = self._thread = None

    def _run(self, epoll: select.epoll, agenda: "_Agenda", ends: "_Ends") -> None:
        is_behind = False
        while True:
            try:
                if epoll.closed:
                    ends.settle()
                    return
                self._give_turns(epoll, agenda, ends, everyone=is_behind)
                is_behind = False
            except MemoryError:  # whose turns are lost with what was ready, rung or due, nobody knows
                is_behind = True
                time.sleep(_LOOK_S)

    def _give_turns(
        self, epoll: select.epoll, agenda: "_Agenda", ends: "_Ends", *, everyone: bool = False
    ) -> None:
        """To all who are ready, rung or due, or to `everyone`. Returns at once when there is nobody left: the
        epoll is closed then, and what is served from now on is another thread's."""
        wait_s = 0.0 if everyone else _sooner(agenda.wait_s(), ends.wait_s())
        ready = [fd for fd, _ in epoll.poll(wait_s, _MOST_EVENTS)]
        rest = self._served.copy() if everyone else ()
        for fd in dict.fromkeys([*ready, *self._take_rung(), *agenda.take_due(), *rest]):
            self._give_turn(epoll, fd, agenda, ends)
            if epoll.closed:
                return
        ends.look()

    def _give_turn(self, epoll: select.epoll, fd: int, agenda: "_Agenda", ends: "_Ends") -> None:
        """A fault ends who has it, and nobody else."""
        if (seat := self._served.get(fd)) is None:
            return
        try:
            if seat.has_turns and seat.served.turn():
                agenda.put(fd, seat.served.wait_s())
                return
            seat.has_turns = False
        except Exception:
            seat.has_turns = False
            tell_error()
        self._part(epoll, fd, seat, agenda, ends)

    def _part(self, epoll: select.epoll, fd: int, seat: "_Seat", agenda: "_Agenda", ends: "_Ends") -> None:
        """With the last one, nothing of this thread's is left."""
        agenda.put(fd, None)
        with self._lock:
            epoll.unregister(fd)
            del self._served[fd]
            self._rung.discard(fd)
            if not self._served:
                seat.thread = self._thread
                self._close()
        ends.begin(seat, seat.served.name)


class _Seat:
    """Of one who is served. Made before the first turn: after the last there may be no memory for it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.has_turns = True
        self.thread: threading.Thread | None = None  # the poller's, where this was the last one

    def __call__(self) -> None:
        """Their end."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()  # so that nobody finds it who waits for the end
        self.served.end()


class _Agenda:
    """Who has a turn when, by descriptor. For one thread."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []  # a heap, in which some entries are outdated

    def put(self, fd: int, wait_s: float | None) -> None:
        """In place of what was there."""
        if wait_s is None:
            self._due_s.pop(fd, None)
            return
        self._due_s[fd] = due_s = time.monotonic() + wait_s
        heapq.heappush(self._order, (due_s, fd))
        if len(self._order) > 2 * len(self._due_s) + 64:
            self._order = [(due_s, fd) for fd, due_s in self._due_s.items()]
            heapq.heapify(self._order)

    def wait_s(self) -> float | None:
        """Until the next is due; None where none is."""
        while self._order and self._is_outdated(*self._order[0]):
            heapq.heappop(self._order)
        return max(0.0, self._order[0][0] - time.monotonic()) if self._order else None

    def take_due(self) -> list[int]:
        """They have to be put anew."""
        found: list[int] = []
        while self.wait_s() == 0.0:
            found.append(heapq.heappop(self._order)[1])
            del self._due_s[found[-1]]
        return found

    def _is_outdated(self, due_s: float, fd: int) -> bool:
        return self._due_s.get(fd) != due_s


class _Ends:
    """Each has a thread of its own. Nobody waits for that to come up; where it does not, the poller sees to
    the end, and the others wait meanwhile. For one thread."""

    def __init__(self) -> None:
        self._begun: deque[tuple[TimelyThread, float]] = deque()  # and when

    def begin(self, end: Callable[[], object], name: str) -> None:
        try:
            thread = TimelyThread(end, name=name)
            self._begun.append((thread, time.monotonic()))
        except MemoryError:
            _do(end)
            return
        try:
            thread.begin()
        except (NoThread, MemoryError):
            thread.take_back()
            self._begun.pop()
            _do(end)

    def wait_s(self) -> float | None:
        """Until `look` is due; None where there is nothing to look for."""
        return None if all(thread.has_begun for thread, _ in self._begun) else _LOOK_S

    def look(self) -> None:
        for _ in range(len(self._begun)):
            thread, begun_s = self._begun[0]
            if shortage.has_lost(thread, begun_s) and (end := thread.take_back()) is not None:
                self._begun.popleft()
                shortage.tell()
                _do(end)
            elif thread.has_begun:
                self._begun.popleft()
                shortage.relieve()
            else:
                self._begun.rotate(-1)

    def settle(self) -> None:
        """Blocks until each has begun or is done: for a poller that has nobody to serve any more."""
        while self._begun:
            if shortage.is_on:
                time.sleep(_LOOK_S)
            else:
                self._begun[0][0].wait()
            self.look()


def _do(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception:
        tell_error()


def _sooner(one_s: float | None, other_s: float | None) -> float | None:
    return min((each for each in (one_s, other_s) if each is not None), default=None)


_pollers = tuple(Poller() for _ in range(_NUM_POLLERS))


def least_busy() -> Poller:
    """The one that has the fewest to serve."""
    return min(_pollers, key=lambda each: each.num_served)
