"""Snapshots: the content of a writable layer, kept outside of any sandbox until somebody deletes it.

STATE_DIR/snapshots/NAME has `tree`, the layer as an overlay keeps it, and `about.json`. One appears as a
whole, under its name, when all of it is there; a draft whose maker has died is a leftover. Ids in the tree
are those of a range that no sandbox gets, so that what a sandbox has made belongs to nobody on the host; and
only the owner of the state directory can enter it.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from sandbox.arguments import check_type
from sandbox.audit_log import SandboxLog
from sandbox.drafts import discard, discard_left
from sandbox.errors import CapacityError, FileTooLarge, InvalidArgument, SandboxError, UnsafePath
from sandbox.forks import kept_from_children
from sandbox.listings import list_folder
from sandbox.places import INIT_BINARY, check_open, chosen_state_dir, make_folder
from sandbox.processes import ProcessKey
from sandbox.programs import run_program
from sandbox.undisturbed import undisturbed_call

FIRST_ID = 0x6FFF0000  # of all trees; sandboxes get others
_NEWS_S = 0.5
_NO_LIMIT = 1 << 62  # bytes: of a layer, which has one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Statuses of a copy, as copy.c has them. Its words have names in them, which are the sandbox's.
_TOO_MUCH, _NO_ROOM, _FILE_LIMIT, _TOO_DEEP = range(3, 7)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One that is there. `content_bytes` counts data in pages of 4 KiB, not holes."""

    name: str
    image: str  # the image and substrate of the sandbox, and of those that can be made of it
    substrate: str
    content_bytes: int
    entries: int
    made_at_s: float  # of the epoch
    sandbox_id: str  # whose layer it was
    state_dir: Path = field(repr=False)

    def delete(self) -> bool:
        """See `Snapshots.delete`."""
        return Snapshots(self.state_dir).delete(self.name)


@dataclass(frozen=True, slots=True)
class Content:
    """What a new sandbox's layer has in it at first."""

    directory: int  # descriptor
    first_id: int
    of: str  # name of a snapshot, or id of a sandbox
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A layer that is to be copied, and what is to be said of the copy."""

    sandbox_id: str
    image: str
    substrate: str
    open: Callable[[], int]  # a descriptor of it, or OSError
    first_id: int  # of the sandbox's ids
    check: Callable[[], None]  # raises SandboxGone where the sandbox has ended
    state_dir: Path
    within: ProcessKey | None = (
        None  # process in whose user namespace the ids are that; None: of this process
    )

    @contextmanager
    def opened(self) -> Generator[Content]:
        """As content of another sandbox's layer, which is to be read while this one does not change. A
        sandbox that is killed lets its processes go on for a moment: whoever has read it checks again. What
        only its own user namespace may read is copied first, to files of this user's."""
        if self.within is None:
            with self.layer() as fd:
                yield Content(fd, self.first_id, self.sandbox_id)
            return
        with Snapshots(self.state_dir).copied(self, "", _NO_LIMIT) as (draft, _), _open_tree(draft) as fd:
            yield Content(fd, _first_id(), self.sandbox_id)

    @contextmanager
    def layer(self) -> Generator[int]:
        """A descriptor of it as it is. SandboxError where it cannot be reached any more."""
        with self._held(self.open) as layer:
            yield layer

    @contextmanager
    def namespace(self) -> Generator[int | None]:
        """A descriptor of the user namespace in which its ids are those; None for this process's own."""
        if self.within is None:
            yield None
            return
        with self._held(partial(self.within.open, "ns/user", os.O_RDONLY)) as namespace:
            yield namespace

    def _check_for_a_while(self) -> None:
        """Its end, where that is why it failed, is heard of a moment later."""
        give_up_s = time.monotonic() + _NEWS_S
        while time.monotonic() < give_up_s:
            self.check()
            time.sleep(0.005)

    @contextmanager
    def _held(self, opener: Callable[[], int]) -> Generator[int]:
        try:
            fd = opener()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                self.check()
                raise
            self._check_for_a_while()
            words = f"the layer of sandbox {self.sandbox_id} cannot be reached any more"
            raise SandboxError(
                f"{words}: {error.strerror or error}",
                hint="the sandbox runs on and cannot be copied: read what you need of its files, kill it and "
                "create another",
                sandbox_id=self.sandbox_id,
            ) from error
        with kept_from_children(fd):
            self.check()
            yield fd


class Snapshots:
    """Those of one state directory; AuthError for another user's. Any number of processes may use it."""

    def __init__(self, state_dir: Path | str | None = None) -> None:
        self._state_dir = chosen_state_dir(state_dir)
        self._directory = self._state_dir / "snapshots"
        check_open(self._directory)

    def list(self) -> tuple[Snapshot, ...]:
        """All, by name."""
        found = [self._load(place) for place in list_folder(self._directory) if _NAME.fullmatch(place.name)]
        return tuple(each for each in found if each is not None)

    def get(self, name: str) -> Snapshot:
        """The one of that name. InvalidArgument where there is none."""
        check_type("name", name, str)
        found = self._load(self._directory / name) if _NAME.fullmatch(name) else None
        if found is None:
            known = ", ".join(each.name for each in self.list()[:8]) or "none"
            raise InvalidArgument(f"snapshot={name!r} is not there", hint=f"there are: {known}")
        return found

    @undisturbed_call
    def delete(self, name: str) -> bool:
        """Removes it, once no create reads it any more (milliseconds). False when there is none."""
        doomed, known = self._draft_path(), self._load(self._directory / _checked(name))
        try:
            (self._directory / name).rename(doomed)
        except FileNotFoundError:
            return False
        log = SandboxLog(self._state_dir, "" if known is None else known.sandbox_id)
        log.note("delete_snapshot", name=name)  # in any case: it makes room on a disk that is full
        with suppress(InvalidArgument), _open_tree(doomed) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
        discard(doomed)
        return True

    def check_new(self, name: str) -> None:
        """Raises InvalidArgument for what is no name, or one that is taken by now."""
        if (self._directory / _checked(name)).exists():
            raise _taken(name)

    def keep(self, source: Source, name: str, *, max_bytes: int) -> Snapshot:
        """Copies a layer that does not change meanwhile, and keeps it under that name; blocks for as long as
        the copy takes. InvalidArgument for a name that is taken, FileTooLarge beyond `max_bytes`,
        CapacityError where the disk is full. Nothing is kept of one that failed."""
        self.check_new(name)
        place = self._directory / name
        with self.copied(source, name, max_bytes) as (draft, about):
            source.check()
            try:
                draft.rename(place)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _taken(name) from None
                raise
        return about

    @contextmanager
    def opened(self, name: str) -> Generator[Content]:
        """One of those kept, which stays while the block runs. InvalidArgument where there is none."""
        about = self.get(name)
        with _open_tree(self._directory / name) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not _is_at(fd, self._directory / name / "tree"):  # or a create reads half of it
                raise InvalidArgument(f"snapshot={name!r} was deleted meanwhile")
            yield Content(fd, _first_id(), name, about)

    @contextmanager
    def copied(self, source: Source, name: str, max_bytes: int) -> Generator[tuple[Path, Snapshot]]:
        """A draft with the layer in `tree`, and what will be known of it; gone with the block, unless it has
        been moved. Raises as `keep` does."""
        make_folder(self._directory, 0o700)
        discard_left()
        draft = Path(tempfile.mkdtemp(prefix=_draft_prefix(), dir=self._directory))
        try:
            (draft / "tree").mkdir()
            content_bytes, entries = _copy(source, draft / "tree", max_bytes)
            about = Snapshot(
                name, source.image, source.substrate, content_bytes, entries, time.time(), source.sandbox_id,
                self._state_dir,
            )  # fmt: skip
            fields = {key: value for key, value in asdict(about).items() if key not in ("name", "state_dir")}
            (draft / "about.json").write_text(json.dumps(fields))
            yield draft, about
        finally:
            if draft.exists():
                discard(draft)

    def _draft_path(self) -> Path:
        return self._directory / f"{_draft_prefix()}{secrets.token_hex(6)}"

    def _load(self, path: Path) -> Snapshot | None:
        try:
            fields = json.loads((path / "about.json").read_text())
            return Snapshot(name=path.name, state_dir=self._state_dir, **fields)
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None


def _copy(source: Source, target: Path, max_bytes: int) -> tuple[int, int]:
    """Bytes and entries copied. Who is asked for more memory or patience is the program that copies."""
    with source.layer() as layer, source.namespace() as namespace:
        words = [
            *_in_namespace(namespace),
            str(INIT_BINARY),
            "copy",
            f"/proc/self/fd/{layer}",
            str(target),
        ]
        words += [str(source.first_id), str(_first_id()), str(max_bytes), str(os.getpid())]
        fds = (layer,) if namespace is None else (layer, namespace)
        done = run_program(words, fds=fds)
    if done.returncode == 0:
        content_bytes, entries = map(int, done.stdout.split())
        return content_bytes, entries
    said = done.stderr.strip().removeprefix("dockyard-init: ") or _end_of(done.returncode)
    if done.returncode == _TOO_MUCH:
        raise FileTooLarge(
            f"the layer of sandbox {source.sandbox_id} has {said}", path="/", number=errno.EFBIG,
            hint="allow more with max_mb, or remove something in the sandbox", sandbox_id=source.sandbox_id,
        )  # fmt: skip
    if done.returncode == _TOO_DEEP:
        error = UnsafePath(
            f"the layer of sandbox {source.sandbox_id} cannot be copied: {said}", path="/",
            number=errno.ENAMETOOLONG, hint="remove it in the sandbox", sandbox_id=source.sandbox_id,
        )  # fmt: skip
        error.blame = "agent"
        raise error
    free = shutil.disk_usage(target).free
    if done.returncode == _NO_ROOM:
        hint = f"{target.parents[2]} has {free >> 20} MiB free; delete snapshots or make room"
        raise CapacityError(f"copying the layer: {said}", hint=hint, sandbox_id=source.sandbox_id)
    if done.returncode == _FILE_LIMIT:
        hint = "raise `ulimit -f` of the process that owns the sandbox, or remove something in the sandbox"
        raise CapacityError(f"copying the layer: {said}", hint=hint, sandbox_id=source.sandbox_id)
    raise SandboxError(f"copying the layer: {said}", sandbox_id=source.sandbox_id)


def _end_of(returncode: int) -> str:
    """Of a program that has said nothing."""
    if returncode < 0:
        return f"the program that copies was ended by {signal.Signals(-returncode).name}; try again"
    return f"the program that copies ended with status {returncode}"


@contextmanager
def _open_tree(place: Path) -> Generator[int]:
    try:
        fd = os.open(place / "tree", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InvalidArgument(f"snapshot={place.name!r} was deleted meanwhile") from None
    with kept_from_children(fd):
        yield fd


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _in_namespace(namespace: int | None) -> list[str]:
    """As its root, which reads what all ids have, and gives files to this user, who is that root."""
    if namespace is None:
        return []
    return ["nsenter", f"--user=/proc/self/fd/{namespace}", "--preserve-credentials", "--"]


def _first_id() -> int:
    """An ordinary user has one id, inside and outside."""
    return FIRST_ID if os.geteuid() == 0 else 0


def _draft_prefix() -> str:
    return f".draft-{os.getpid()}-"


def _checked(name: str) -> str:
    check_type("name", name, str)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"snapshot name {name!r}", hint="use letters, digits, '.', '_' and '-', 64 at most"
        )
    return name


def _taken(name: str) -> InvalidArgument:
    return InvalidArgument(f"snapshot {name!r} is there already", hint="delete it, or use another name")
