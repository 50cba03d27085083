"""Programs that take as much of something as they are told to.

They run in a sandbox, or outside of one for the control, with nothing but the standard library. What takes it
all returns words; what is held raises OSError or LookupError, or is ended.
"""

# Names in /proc and numbers of descriptors are what it is about:
# ruff: noqa: PTH110
import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


def processes(count: str) -> str:
    """So many at a time."""
    reader, writer = os.pipe()
    children: list[int] = []
    try:
        for _ in range(int(count)):
            if (child := os.fork()) == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            children.append(child)
    finally:
        os.close(writer)
        for child in children:
            os.waitpid(child, 0)
    return f"{count} processes at a time"


def threads(count: str) -> str:
    """So many at a time."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(int(count)):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise LookupError("EAGAIN") from error
    finally:
        end.set()
        for thread in started:
            thread.join()
    return f"{count} threads at a time"


def memory(mebibytes: str) -> str:
    """Written to, so that it is there."""
    room = bytearray(int(mebibytes) * MIB)
    return f"{len(room) // MIB} MiB of memory"


def shared_memory(mebibytes: str) -> str:
    """A System V segment that no process need hold."""
    LIBC.shmat.restype = ctypes.c_void_p
    segment = LIBC.shmget(0, ctypes.c_size_t(int(mebibytes) * MIB), 0o1600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "refused")
    try:
        ctypes.memset(LIBC.shmat(segment, None, 0), 1, int(mebibytes) * MIB)
    finally:
        LIBC.shmctl(segment, 0, None)
    return f"{mebibytes} MiB of shared memory"


def find_segment(key: str) -> str:
    """A System V segment of somebody else, by its key."""
    if LIBC.shmget(int(key), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return "it is there"


def bytes_in(folder: str, mebibytes: str) -> str:
    """One file."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(int(mebibytes)):
            file.write(bytes(MIB))
        file.flush()
    return f"{mebibytes} MiB in {folder}"


def bytes_in_all(mebibytes: str, *folders: str) -> str:
    """One file in each, at a time."""
    with ExitStack() as kept:
        for folder in folders:
            file = kept.enter_context(tempfile.NamedTemporaryFile(dir=folder))
            for _ in range(int(mebibytes)):
                file.write(bytes(MIB))
            file.flush()
    return f"{mebibytes} MiB in each of {len(folders)}"


def fill(folder: str) -> str:
    """All there is, and leaves it so."""
    with Path(folder, "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))


def unpack(folder: str, mebibytes: str) -> str:
    """An archive of a few kilobytes that holds a great deal."""
    import zipfile

    with tempfile.TemporaryDirectory(dir=folder) as place:
        bomb = Path(place, "bomb.zip")
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("large", bytes(int(mebibytes) * MIB))
        with zipfile.ZipFile(bomb) as archive:
            archive.extractall(place)
    return f"{mebibytes} MiB from a small archive"


def files_in(folder: str, count: str) -> str:
    """Empty ones."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for number in range(int(count)):
            os.close(os.open(f"{place}/{number}", os.O_CREAT | os.O_WRONLY))
    return f"{count} files in {folder}"


def sockets(count: str) -> str:
    """Open at a time, each with a port."""
    kept: list[socket.socket] = []
    for _ in range(int(count)):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        kept.append(one)
        one.bind(("127.0.0.1", 0))
    return f"{count} sockets at a time"


def names(folder: str, count: str) -> str:
    """Looked for in vain, each of which the kernel remembers for a while."""
    for number in range(int(count)):
        os.path.exists(f"{folder}/{number:0200}")
    raise LookupError("looked for them")


def processor(seconds: str, workers: str) -> str:
    """Time, on as many processors as there are."""
    end = time.monotonic() + float(seconds)
    children: list[int] = []
    for _ in range(int(workers)):
        if (child := os.fork()) == 0:
            while time.monotonic() < end:
                pass
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    raise LookupError("burnt")


def share(workers: str, processor: str, starts: str, ends: str) -> str:
    """Seconds of one processor that so many processes get between two moments of the monotonic clock."""
    os.sched_setaffinity(0, {int(processor)})
    while time.monotonic() < float(starts):
        time.sleep(0.001)
    for _ in range(int(workers)):
        if os.fork() == 0:
            while time.monotonic() < float(ends):
                pass
            os._exit(0)
    for _ in range(int(workers)):
        os.wait()
    used = os.times()
    return str(used.children_user + used.children_system)


def disk_writes(folder: str, mebibytes: str) -> str:
    """Bytes that the kernel is made to bring to a disk."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(int(mebibytes)):
            file.write(bytes(MIB))
            file.flush()
            os.fsync(file.fileno())
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    if int(counts["write_bytes"]) < MIB:
        raise LookupError("nothing was written to a disk")
    return f"{int(counts['write_bytes']) // MIB} MiB were written to a disk"


def zombies(count: str, whose: str) -> str:
    """Dead children: `own` are never waited for, `orphans` are left to whoever takes them in."""
    for _ in range(int(count)):
        if (child := os.fork()) == 0:
            if whose == "orphans":
                while True:
                    with suppress(OSError):  # those before it are being taken in
                        if os.fork() == 0:
                            os._exit(0)
                        break
            os._exit(0)
        if whose == "orphans":
            os.waitpid(child, 0)
    raise LookupError(f"{count} came and went")


def kill_everything() -> str:
    """Every process that it may send a signal to."""
    os.kill(-1, signal.SIGKILL)
    return "sent"


def wait_uninterruptibly(state: str) -> str:
    """A process that waits in the kernel for a child which does not come to run its program. Another notes
    its state when it is so far."""
    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/fifo"
        os.mkfifo(fifo)
        watched = os.getpid()
        if os.fork() == 0:
            _note_when_stuck(watched, Path(state))
        action = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=action)
    return "came back"


def wait(seconds: str) -> str:
    """Longer than it may."""
    time.sleep(float(seconds))
    return f"slept {seconds} s"


def say(kilobytes: str) -> str:
    """On one line, without an end."""
    for _ in range(int(kilobytes)):
        sys.stdout.write("x" * 1024)
    sys.stdout.write("\n")
    return f"{kilobytes} KiB were said"


def say_bytes(text: str) -> str:
    """Bytes that are no text, given in hexadecimal."""
    os.write(1, bytes.fromhex(text))
    os._exit(0)


def _note_when_stuck(watched: int, state: Path) -> None:
    while ") D " not in Path(f"/proc/{watched}/stat").read_text():
        time.sleep(0.005)
    state.write_text("D")
    os._exit(0)
