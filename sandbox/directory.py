"""Sandboxes by their id: those of this process, those of others, and those that are no more.

The journal says which process owns which sandbox; that process is asked for the rest (`sandbox.door`).
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar, get_args

from sandbox.answers import Asked, answer
from sandbox.arguments import check_type
from sandbox.attached import AttachedSandbox, Line
from sandbox.audit_log import entries
from sandbox.closing import PATIENCE_S, Gate
from sandbox.door import Door, HasLeft, Request, Tell, ask, gone_with, understood
from sandbox.errors import (
    AuthError,
    GoneReason,
    InvalidArgument,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    UnsupportedError,
    error_of,
    telling_shortage,
)
from sandbox.forks import leave_in_children
from sandbox.journal import Journal, Record
from sandbox.orders import checked_labels
from sandbox.places import chosen_state_dir
from sandbox.processes import ProcessKey, boot_id, this_process
from sandbox.status import IdleWish, SandboxStatus, status_of
from sandbox.undisturbed import undisturbed_call

MAX_ENDED = 1_000  # of this process, that are remembered, in a kibibyte each; the audit log knows the others
StateDir = Path | str | None  # None: the default one
_ID = re.compile(r"sbx-[0-9a-f]{15}")


class Member(Asked, Protocol):
    """A sandbox of this process."""

    @property
    def id(self) -> str: ...
    @property
    def ended(self) -> SandboxGone | None: ...


T = TypeVar("T", bound=Member)


class Directory(Generic[T]):
    """Of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._live: dict[tuple[Path, str], T] = {}
        self._ended: OrderedDict[tuple[Path, str], SandboxGone] = OrderedDict()
        self._door = Door(self._answer)
        self._gate = Gate()
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork, which has its parent's objects and none of the threads that serve them: what
        the parent has is another process's."""
        self._lock, self._live, self._ended = threading.Lock(), {}, OrderedDict()
        self._door.leave()

    def add(self, state_dir: Path, member: T) -> None:
        """One that has come up. The first opens this process's door."""
        with self._lock:
            self._live[state_dir, member.id] = member
        if (gone := member.ended) is not None:  # quicker than this
            self.remove(state_dir, member.id, gone)
        self.open_door()

    def open_door(self) -> bool:
        """Answers other processes from now on, as it does from the first sandbox on. See `Door.open`."""
        return self._door.open()

    def making(self) -> AbstractContextManager[None]:
        """While one is made, until it has been added. StartError once this process ends."""
        return self._gate.passing()

    def end_all(self, patience_s: float = PATIENCE_S) -> None:
        """At this process's end: what nobody has killed leaves nothing for a sweep, and no more are made;
        those that threads are making are waited for, `patience_s` at most, and then those who have asked for
        something. Whatever one kill raises, the others follow; an interrupt is raised at the end."""
        tried, interrupts = set[tuple[Path, str]](), list[BaseException]()
        self._gate.close()
        for wait in (lambda: None, lambda: self._gate.wait(patience_s), self._door.finish):
            try:
                wait()
            except BaseException as error:
                interrupts.append(error)
            interrupts += self._kill_others(tried)
        if interrupts:
            raise interrupts[0]

    def _kill_others(self, tried: set[tuple[Path, str]]) -> list[BaseException]:
        with self._lock:
            left = {place: member for place, member in self._live.items() if place not in tried}
        tried.update(left)
        interrupts: list[BaseException] = []
        for member in left.values():
            try:
                member.kill()
            except Exception:  # a sweep finds what is left, and says it
                continue
            except BaseException as error:
                interrupts.append(error)
        return interrupts

    def remove(self, state_dir: Path, sandbox_id: str, gone: SandboxGone) -> None:
        """One that has ended, and why. One that has not been added is none."""
        with self._lock:
            if self._live.pop((state_dir, sandbox_id), None) is None:
                return
            self._ended[state_dir, sandbox_id] = gone
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def own(self, state_dir: Path) -> tuple[T, ...]:
        """Those of this process that live, oldest first."""
        with self._lock:
            return tuple(member for (state, _), member in self._live.items() if state == state_dir)

    def find(self, state_dir: Path, sandbox_id: str) -> T | None:
        """One of this process; None where it is not one of its own. Raises SandboxGone."""
        with self._lock:
            known = self._ended.get((state_dir, sandbox_id))
            member = self._live.get((state_dir, sandbox_id))
        if known is not None:
            raise error_of(known.record())  # not the one that is kept, which would keep its callers
        if member is not None and (gone := member.ended) is not None:
            raise gone
        return member

    @undisturbed_call
    def connect(self, sandbox_id: str, *, state_dir: StateDir = None) -> T:
        """See `Sandbox.connect`."""
        state = chosen_state_dir(state_dir)
        if (member := self.find(state, _checked(sandbox_id))) is not None:
            return member
        owner = owner_of(state, sandbox_id)
        raise UnsupportedError(
            f"sandbox {sandbox_id} is owned by process {owner.pid}, and one process alone can hold its "
            "control socket",
            capability="connect from another process", sandbox_id=sandbox_id,
            hint="`sandbox.sandboxes.attach` gives what that process does for others: commands and "
            "their output, files, timeouts, kill; sessions and terminals are for that process itself",
        )  # fmt: skip

    @undisturbed_call
    def attach(self, sandbox_id: str, *, state_dir: StateDir = None) -> AttachedSandbox:
        """One of any process of this user's: its owner does what is asked. Raises SandboxNotFound,
        SandboxGone, AuthError, UnsupportedError."""
        state = chosen_state_dir(state_dir)
        is_own = self.find(state, _checked(sandbox_id)) is not None
        owner = this_process() if is_own else owner_of(state, sandbox_id)
        attached = AttachedSandbox(Line(sandbox_id, state, owner))
        attached.get_info()
        return attached

    @undisturbed_call
    def list(
        self, *, labels: Mapping[str, str] | None = None, state_dir: StateDir = None
    ) -> tuple[SandboxStatus, ...]:
        """See `Sandbox.list`."""
        state, wanted = chosen_state_dir(state_dir), dict(checked_labels(labels or {}))
        found = {each.id: each for each in self._own_statuses(state)}
        for owner, ids in _others(state).items():
            found |= {each.id: each for each in _ask_for_all(owner, ids, state)}
        return tuple(each for _, each in sorted(found.items()) if each.has(wanted))

    @undisturbed_call
    def info(self, sandbox_id: str, *, state_dir: StateDir = None) -> SandboxStatus:
        """Of any process's. Raises SandboxNotFound, SandboxGone, AuthError, UnsupportedError."""
        return self._with(state_dir, sandbox_id, "info", _info)

    @undisturbed_call
    def set_timeout(
        self,
        sandbox_id: str,
        lifetime_s: float | None = None,
        *,
        idle_s: IdleWish = "keep",
        state_dir: StateDir = None,
    ) -> SandboxStatus:
        """Likewise, and InvalidArgument."""
        return self._with(
            state_dir, sandbox_id, "set_timeout",
            lambda member: member.set_timeout(lifetime_s, idle_s=idle_s),
            lifetime_s=lifetime_s, idle_s=idle_s,
        )  # fmt: skip

    @undisturbed_call
    def kill(self, sandbox_id: str, *, state_dir: StateDir = None) -> SandboxStatus:
        """Likewise, but for InvalidArgument. Returns how it stood."""
        return self._with(state_dir, sandbox_id, "kill", _kill)

    def _with(
        self,
        state_dir: StateDir,
        sandbox_id: str,
        deed: str,
        do: Callable[[T], SandboxStatus],
        **words: object,
    ) -> SandboxStatus:
        state = chosen_state_dir(state_dir)
        if (member := self.find(state, _checked(sandbox_id))) is not None:
            return do(member)
        owner = owner_of(state, sandbox_id)
        request = {"do": deed, "id": sandbox_id, "state_dir": str(state), **words}
        return understood(owner, status_of, ask(owner, request))

    def _answer(self, request: Request, has_left: HasLeft, tell: Tell) -> Any:
        """To another process, on a thread of its connection's."""
        state_dir = Path(str(request["state_dir"]))
        if request["do"] == "list":
            return [each.record() for each in self._own_statuses(state_dir)]
        sandbox_id = str(request["id"])
        if (member := self.find(state_dir, sandbox_id)) is None:
            raise SandboxNotFound(f"sandbox {sandbox_id} is not this process's", sandbox_id=sandbox_id)
        return answer(member, str(request["do"]), request, has_left, tell)

    def _own_statuses(self, state_dir: Path) -> Iterator[SandboxStatus]:
        for member in self.own(state_dir):
            with suppress(SandboxGone):  # just now
                yield member.get_info()


@telling_shortage("looking for a sandbox")
def owner_of(state_dir: Path, sandbox_id: str) -> ProcessKey:
    """The other process that has it. Raises AuthError for another user's, SandboxGone for one that has ended,
    SandboxNotFound, CapacityError where no descriptor is left to look."""
    try:
        record = Journal(state_dir).find(sandbox_id)
        if record is None:
            _tell_end(state_dir, sandbox_id)
    except PermissionError as error:
        raise AuthError(
            f"{error.filename or state_dir} is another user's", hint="ask as its user, or as root"
        ) from error
    if record.owner == this_process():
        raise SandboxNotFound(f"sandbox {sandbox_id} is still being made", sandbox_id=sandbox_id)
    uid = _uid_of(record)
    if uid is None:
        raise gone_with(record.owner, sandbox_id)
    if os.geteuid() not in (0, uid):
        raise AuthError(
            f"sandbox {sandbox_id} is owned by process {record.owner.pid} of uid {uid}",
            hint="ask as its user, or as root", sandbox_id=sandbox_id,
        )  # fmt: skip
    return record.owner


def _tell_end(state_dir: Path, sandbox_id: str) -> NoReturn:
    """What the audit log knows of it. Reads all of the log, which is a matter of a second at most."""
    for each in entries(state_dir):
        if (each.get("sandbox"), each.get("deed")) == (sandbox_id, "end"):
            text = f"sandbox {sandbox_id} has ended: {each.get('reason')}"
            raise SandboxGone(
                text, reason=_reason(each.get("reason")), hint="create a new one", sandbox_id=sandbox_id
            )
    raise SandboxNotFound(
        f"there is no sandbox {sandbox_id} in {state_dir}",
        hint="`dockyard sandbox list` shows those that live; another state directory has others",
        sandbox_id=sandbox_id,
    )


@telling_shortage("looking for sandboxes")
def _others(state_dir: Path) -> dict[ProcessKey, list[str]]:
    """Processes that live, but for this one, and what they own."""
    owners: dict[ProcessKey, list[str]] = {}
    for record in _records(state_dir):
        if record.owner != this_process() and _lives(record):
            owners.setdefault(record.owner, []).append(record.id)
    return owners


def _reason(text: object) -> GoneReason:
    """What the log says, which has more words than errors have."""
    for known in get_args(GoneReason):
        if known == text:
            return known
    return "lost"


def _ask_for_all(owner: ProcessKey, ids: Sequence[str], state_dir: Path) -> list[SandboxStatus]:
    """Those whose owner does not answer, or with an error (it is busy, or of another version), are told by
    their ids alone; where it has just ended, there are none."""
    try:
        answer = ask(owner, {"do": "list", "state_dir": str(state_dir)})
        return [status_of(each) for each in answer]
    except SandboxGone:
        return []
    except (SandboxError, ValueError, TypeError):
        return [SandboxStatus(each, owner.pid) for each in ids]


def _records(state_dir: Path) -> list[Record]:
    try:
        return Journal(state_dir).records()
    except PermissionError as error:
        raise AuthError(f"{state_dir} is another user's", hint="ask as its user, or as root") from error


def _uid_of(record: Record) -> int | None:
    """Of its owner; None where that lives no more."""
    try:
        uid = Path(f"/proc/{record.owner.pid}").stat().st_uid
    except FileNotFoundError:
        return None
    return uid if _lives(record) else None


def _lives(record: Record) -> bool:
    return record.boot == boot_id() and record.owner.is_alive()


def _info(member: Member) -> SandboxStatus:
    return member.get_info()


def _kill(member: Member) -> SandboxStatus:
    before = member.get_info()
    member.kill()
    return before


def _checked(sandbox_id: str) -> str:
    check_type("id", sandbox_id, str)
    if not _ID.fullmatch(sandbox_id):
        raise InvalidArgument(f"id={sandbox_id!r} is no sandbox's", hint="such as sbx-3f9a61c04be2d17")
    return sandbox_id
