"""A layer in a file: an ext4 of fixed bytes and inodes on a loop device. Needs root and a free loop device.

One template a size is formatted, once. A layer is a copy of it (shared blocks where the file system can, else
its few written ones) in a file without a name, so nothing of it is left when its last mount ends: not the
file, not the device, whatever became of the owner. It is sparse, so sandboxes can ask for more together than
the disk has; a create is refused where the disk could not take the one that is made. No journal and no
barriers: a layer is worth nothing without its sandbox.
"""

import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from sandbox import cgroups
from sandbox.errors import CapacityError, is_shortage
from sandbox.forks import close_left, leave_in_children
from sandbox.layers import loops, mounts
from sandbox.layers.base import Layer, LayerSize
from sandbox.listings import age_s, list_folder
from sandbox.places import make_folder
from sandbox.pool import Pool
from sandbox.programs import run_program
from sandbox.texts import one_line

_VERSION = 1  # of the template's form
_INODE_BYTES, _BLOCK_BYTES, _FICLONE = 256, 4096, 0x40049409
_KEPT_SHARE, _MOST_KEPT = 50, 16 << 20  # what ext4 keeps back for what it has not yet placed
_OWN_BYTES, _OWN_INODES = 512 << 10, 32  # of the file system and the overlay themselves
_FORMAT = (
    *("mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-b", str(_BLOCK_BYTES), "-I", str(_INODE_BYTES)),
    *("-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard"),
)
_MOUNT_FLAGS = ("noinit_itable", "nobarrier")
_SPARE, _SIZES = 1, 4  # layers made ahead of one size, and sizes of which they are
_TEMPLATES = 32  # kept on disk, some hundred kilobytes each
_TRIAL = LayerSize(1 << 20, 64)


class ImageLayers:
    """Keeps one layer ready of each of the sizes asked for last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._found: dict[tuple[Path, int], str] = {}  # by user, too
        self._pools: dict[tuple[Path, LayerSize], Pool[Layer]] = {}
        leave_in_children(self)

    def leave(self) -> None:
        """In a child of a fork: what is ready is for sandboxes of its parent's, and no two have one layer."""
        self._lock = threading.Lock()
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            for layer in pool.leave():
                close_left(layer.mount)

    def missing(self, state_dir: Path) -> str:
        """Formats, attaches and mounts one."""
        with self._lock:
            key = state_dir, os.geteuid()
            if key not in self._found:
                self._found[key] = _attempt(state_dir)
            return self._found[key]

    def make(self, state_dir: Path, sandbox_id: str, size: LayerSize) -> Layer:
        """One from stock, or a new one. CapacityError where the disk has no room for all of it."""
        del sandbox_id  # it has no name
        check_room(state_dir, size)
        return self._pool(state_dir, size).claim()

    def remove(self, layer: Layer) -> None:
        """Closes what launch has not taken."""
        layer.let_go()

    def drain(self) -> None:
        """Removes all that are ready and unclaimed."""
        with self._lock:
            pools = list(self._pools.values())
            self._pools.clear()
        for pool in pools:
            pool.close()

    def _pool(self, state_dir: Path, size: LayerSize) -> Pool[Layer]:
        with self._lock:
            pool = self._pools.pop((state_dir, size), None)
            if pool is None:
                pool = Pool(lambda: _make(state_dir, size), Layer.let_go, _SPARE)
            self._pools[state_dir, size] = pool  # last, as the one used last
            oldest = self._pools.pop(next(iter(self._pools))) if len(self._pools) > _SIZES else None
        if oldest is not None:
            oldest.close()
        return pool


def place(state_dir: Path) -> Path:
    """Where templates lie, and layers without a name. Its file system is what layers are made of."""
    directory = state_dir / "layers"
    make_folder(directory, 0o700)
    return directory


def _attempt(state_dir: Path) -> str:
    if os.geteuid() != 0:
        return "a layer in a file needs root"
    if shutil.which("mke2fs") is None:
        return "mke2fs is not there: apt-get install e2fsprogs"
    check_room(state_dir, _TRIAL)
    try:
        _make(state_dir, _TRIAL).let_go()
    except OSError as error:
        if is_shortage(error):
            raise
        return f"a loop device with ext4: {error.strerror or error}"
    except CapacityError as error:
        return error.message
    return ""


def _make(state_dir: Path, size: LayerSize) -> Layer:
    template = _template(place(state_dir), size)
    file = os.open(template.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with template.open("rb") as source:
            _copy_sparse(source.fileno(), file)
        with loops.attached(file, cgroups.state_key(state_dir)) as device:
            return Layer(mounts.mount_device("ext4", device, _MOUNT_FLAGS))
    finally:
        os.close(file)


def _template(directory: Path, size: LayerSize) -> Path:
    """Made beside its place and moved there: nobody ever sees half of one."""
    path = directory / f"template-{_VERSION}-{size.bytes}-{size.inodes}.ext4"
    if path.exists():
        return path
    fd, draft = tempfile.mkstemp(prefix=f"draft-{os.getpid()}-", dir=directory)
    os.close(fd)
    try:
        os.truncate(draft, _file_bytes(size))
        words = [*_FORMAT, "-N", str(size.inodes + _OWN_INODES), draft]
        done = run_program(words)
        if done.returncode != 0:
            raise CapacityError(f"formatting a layer of {size.bytes >> 20} MiB: {one_line(done.stderr)}")
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)
    _forget_old(directory)
    return path


def _forget_old(directory: Path) -> None:
    """Templates of sizes that were asked for long ago: a new one costs milliseconds."""
    for path in sorted(list_folder(directory, "template-*"), key=age_s)[_TEMPLATES:]:
        path.unlink(missing_ok=True)


def _file_bytes(size: LayerSize) -> int:
    own = _OWN_BYTES + size.bytes // 1000 + (size.inodes + _OWN_INODES) * _INODE_BYTES
    kept = min(size.bytes // _KEPT_SHARE, _MOST_KEPT)
    return -(-(size.bytes + kept + own) // _BLOCK_BYTES) * _BLOCK_BYTES


def _copy_sparse(source: int, target: int) -> None:
    with suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    end = os.fstat(source).st_size
    os.ftruncate(target, end)
    start = 0
    while start < end:
        try:
            start = os.lseek(source, start, os.SEEK_DATA)
        except OSError:  # a hole to the end
            return
        stop = os.lseek(source, start, os.SEEK_HOLE)
        while start < stop:
            start += os.copy_file_range(source, target, stop - start, start, start)


def check_room(state_dir: Path, size: LayerSize) -> None:
    """CapacityError where the disk has less free than all of it."""
    disk = os.statvfs(place(state_dir))
    free = disk.f_bavail * disk.f_frsize
    if free < _file_bytes(size):
        raise CapacityError(
            f"disk_mb={size.bytes >> 20}: {state_dir} has {free >> 20} MiB free",
            hint="free some, or ask for less",
        )
