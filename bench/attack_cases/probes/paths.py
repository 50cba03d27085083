"""Files, processes and descriptors that a program might reach, by name or by what it was given.

Runs in a sandbox, or outside of one for the control, with nothing but the standard library. What opens a door
returns words; what finds it shut raises OSError or LookupError.
"""

# Names in /proc and numbers of descriptors are what it is about:
# ruff: noqa: PTH115, PTH208
import ctypes
import errno
import os
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

KERNEL_MEMORY = (
    *("/proc/kcore", "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup", "/proc/kallsyms"),
    *("/proc/timer_list", "/proc/iomem", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg"),
)
STEP_BYTES = 1 << 16


def open_any(mode: str, *paths: str) -> str:
    """Opens the first that lets itself be opened; nothing is written or made."""
    flags = {"read": os.O_RDONLY, "write": os.O_WRONLY}[mode] | os.O_NONBLOCK
    failures: set[str] = set()
    for path in paths:
        try:
            os.close(os.open(path, flags))
        except OSError as error:
            failures.add(errno.errorcode[error.errno or 0])
        else:
            return f"opened {path}"
    raise LookupError(" ".join(sorted(failures)))


def make_file(*paths: str) -> str:
    """Makes the first new file, or opens the first old one for writing, that lets itself be."""
    failures: set[str] = set()
    for path in paths:
        there = Path(path).exists()
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
        except OSError as error:
            failures.add(errno.errorcode[error.errno or 0])
            continue
        if not there:
            Path(path).unlink()
        return f"wrote to {path}"
    raise LookupError(" ".join(sorted(failures)))


def swap(path: str, make: str = "") -> str:
    """Puts a link in a file's place, as an image would that wants to mislead who mounts over it."""
    if make:
        Path(path).write_bytes(b"")
    Path(f"{path}.new").symlink_to("/proc/sysrq-trigger")
    Path(f"{path}.new").replace(path)
    Path(path).unlink()
    return f"{path} was a link"


def look_into_parents(what: str) -> str:
    """An entry of /proc/PID of this process's parent and of pid 1, as far as it takes to read something."""
    failure: OSError | None = None
    for pid in (os.getppid(), 1):
        try:
            _look_into(Path(f"/proc/{pid}/{what}"))
        except OSError as error:
            failure = error
        else:
            return f"read {what} of process {pid}"
    assert failure is not None
    raise failure


def use_descriptors() -> str:
    """Enters a directory that some descriptor of this process leads to."""
    for fd in _descriptors():
        with suppress(OSError):
            os.chdir(f"/proc/self/fd/{fd}")
            return f"descriptor {fd} leads to {os.readlink(f'/proc/self/fd/{fd}')}"
    raise LookupError("no descriptor leads to a directory")


def list_descriptors() -> str:
    """Anything that was left open for this process, beyond input and output."""
    extra = [fd for fd in _descriptors() if fd > 2]
    if not extra:
        raise LookupError("only 0, 1 and 2")
    return f"left open: {extra}"


def read_environment(*names: str) -> str:
    """Variables of whoever made this process."""
    found = [name for name in names if name in os.environ]
    if not found:
        raise LookupError("none of them is set")
    return f"set: {' '.join(found)}"


def find_file(path: str) -> str:
    """A file by its name on the host, from here and from every root and working directory in /proc."""
    roots = ["", *(f"/proc/{pid}/{each}" for pid in _pids() for each in ("root", "cwd"))]
    for root in roots:
        with suppress(OSError):
            if Path(f"{root}{path}").read_bytes():
                return f"read {root}{path}"
    raise LookupError("not there")


def find_in_processes(backwards: str, *what: str) -> str:
    """A text in these files (environ, cmdline) of any process. It is given backwards, so that whoever looks
    for it does not have it among its own arguments."""
    text = backwards[::-1].encode()
    for pid in _pids():
        for name in what:
            with suppress(OSError):
                if text in Path(f"/proc/{pid}/{name}").read_bytes():
                    return f"in {name} of process {pid}"
    raise LookupError("nowhere")


def find_any_entry(*folders: str) -> str:
    """Something in the first of these folders that has something."""
    for folder in folders:
        with suppress(OSError):
            if names := os.listdir(folder):
                return f"{folder} has {names[0]}"
    raise LookupError("empty")


def make_device(kind: str, major: str, minor: str) -> str:
    """A device of the machine, made where this process may write, and read from."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/device"
        os.mknod(
            path,
            {"block": stat.S_IFBLK, "character": stat.S_IFCHR}[kind] | 0o600,
            os.makedev(int(major), int(minor)),
        )
        os.read(os.open(path, os.O_RDONLY), 512)
    return "made and read it"


def read_kernel_memory() -> str:
    """Files that show what the kernel has in memory, or where. Addresses that are all zero show nothing."""
    failures: set[str] = set()
    for path in KERNEL_MEMORY:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found = os.read(fd, 4096)
            os.close(fd)
        except OSError as error:
            failures.add(errno.errorcode[error.errno or 0])
            continue
        if found and not _addresses_hidden(path, found):
            return f"read {len(found)} bytes of {path}"
    raise LookupError(f"nothing: {' '.join(sorted(failures))}")


def read_everything(*roots: str) -> str:
    """Every regular file below, some bytes of each, as `grep -r` would."""
    num_files = 0
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                with suppress(OSError):
                    fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        os.read(fd, STEP_BYTES)
                    finally:
                        os.close(fd)
                    num_files += 1
    raise LookupError("finished" if num_files > 100 else f"read {num_files} files")


def capability_on_file(path: str) -> str:
    """The right to send raw packets, on a program (struct vfs_cap_data, version 2)."""
    Path(path).write_bytes(b"")
    try:
        os.setxattr(path, "security.capability", bytes.fromhex("0100000200200000" + "00" * 12))
    finally:
        Path(path).unlink()
    return "a program would start with CAP_NET_RAW"


def set_flags(path: str, number: str, request: str, flags: str) -> str:
    """On a file of its own, for as long as this function runs: immutable is one that not even its owner could
    remove."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open("wb") as file:
        for value in (int(flags, 16), 0):
            word = ctypes.c_int(value)
            if libc.syscall(
                ctypes.c_long(int(number)),
                file.fileno(),
                ctypes.c_ulong(int(request, 16)),
                ctypes.byref(word),
            ):
                failure = ctypes.get_errno()
                Path(path).unlink()
                raise OSError(failure, "refused")
    Path(path).unlink()
    return f"it had the flags {flags}"


def take_personality(value: str) -> str:
    """For this process; a program that it starts keeps a part of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.personality(ctypes.c_ulong(int(value, 16))) == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return f"personality {value}"


def change_personality(value: str) -> str:
    """What this process's children start with."""
    take_personality(value)
    return read_personality()


def read_personality() -> str:
    """What this process's own children would start with."""
    found = subprocess.check_output(["cat", "/proc/self/personality"], text=True).strip()
    if int(found, 16) == 0:
        raise LookupError("as it was")
    return f"personality {found}"


def _addresses_hidden(path: str, found: bytes) -> bool:
    """The kernel shows zeros in these to whom they do not concern."""
    shown = b"".join(line.split()[0] for line in found.splitlines() if line.strip())
    return path.endswith(("kallsyms", "iomem")) and set(shown) <= set(b"0-")


def _look_into(path: Path) -> None:
    if path.name == "fd":
        os.open(path / os.listdir(path)[0], os.O_PATH)
        with suppress(IndexError):
            fd = next(each for each in os.listdir(path) if not _is_socket(path / each))
            os.close(os.open(path / fd, os.O_RDONLY | os.O_NONBLOCK))
    elif path.name == "root":
        os.listdir(path)
    else:
        os.read(os.open(path, os.O_RDONLY), 64)


def _is_socket(path: Path) -> bool:
    return os.readlink(path).startswith("socket:")


def _descriptors() -> list[int]:
    listing = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return [int(name) for name in os.listdir(listing) if int(name) != listing and _is_open(int(name))]
    finally:
        os.close(listing)


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()]
