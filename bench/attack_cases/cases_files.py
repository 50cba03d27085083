"""File trust: what a sandbox leaves lying about for whoever takes files from it, and what it would change for
others."""

import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Case, Instead, NoControl, Outside, Probe, Raised, Seen, Shown
from sandbox import Download, Sandbox
from sandbox.errors import FileError, InvalidArgument

SECRET = b"the host's own"
_FULL = frozenset({"ENOSPC"})
_NOBODY = 65534
# A capability as a file has it: version 2, effective; permitted CAP_NET_RAW. Source: linux/capability.h.
_MAY_SEND_RAW = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
_SHARED = ("/usr/bin/planted", "/etc/passwd", "/opt/toolkit/planted", "/.dockyard/planted", "/planted")


def _paths(function: str, *arguments: str) -> Probe:
    return Probe("paths", function, arguments)


@contextmanager
def host_secret(arena: Arena) -> Generator[Path]:
    """A file of the host that every user there may read and write."""
    path = arena.open_place / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o666)
    try:
        yield path
    finally:
        path.unlink()


def _with_link(arena: Arena, act: Callable[[Sandbox, Path], object]) -> Seen:
    """The platform acts on a link that leads to the host's file. Open where that is read or changed."""
    with host_secret(arena) as secret, arena.sandbox(Box(alone=True)) as box:
        box.commands.run(["ln", "-s", str(secret), "link"])
        try:
            found = act(box, secret)
        except FileError as error:
            found = type(error).__name__
        touched = secret.read_bytes() != SECRET or found == SECRET
    return Seen(touched, str(found))


def _read_link(arena: Arena) -> Seen:
    return _with_link(arena, lambda box, _: box.files.read("link"))


def _write_link(arena: Arena) -> Seen:
    return _with_link(arena, lambda box, _: box.files.write("link", b"changed"))


def _download_link(arena: Arena) -> Seen:
    def download(box: Sandbox, secret: Path) -> object:
        del secret
        found = box.files.download_dir("/workspace")
        return found.files.get("link", "the link as a link" if "link" in found.links else "nothing")

    return _with_link(arena, download)


def _write_through_link_outside(arena: Arena) -> Seen:
    """What would happen to a platform that followed the link itself."""
    with host_secret(arena) as secret, TemporaryDirectory(dir=arena.place) as folder:
        link = Path(folder, "link")
        link.symlink_to(secret)
        read = link.read_bytes()
        link.write_bytes(b"changed")
        return Seen(read == SECRET and secret.read_bytes() == b"changed", "read and changed the host's file")


def _upload(make: Callable[[Path, Path], object]) -> Callable[[Arena], Seen]:
    """Uploads a folder in which `make` has put something. Open where the host's file arrives."""

    def deed(arena: Arena) -> Seen:
        with host_secret(arena) as secret, TemporaryDirectory(dir=arena.place) as folder:
            make(Path(folder, "entry"), secret)
            with arena.sandbox(Box(alone=True)) as box:
                box.files.upload_dir(folder, "/workspace/up")
                names = [entry.name for entry in box.files.list("/workspace/up")]
                arrived = "entry" in names and box.files.read("/workspace/up/entry") == SECRET
        return Seen(arrived, "the host's file arrived" if arrived else f"arrived: {names}")

    return deed


_STRANGE_TREE = """
mkdir a A '..\\..' $'new\nline' && touch a/x A/x '..\\..\\escape' $'new\nline/x' ./-rf && mkfifo fifo
ln -s / root && ln -s ../../../.. up && touch setuid && chmod 4755 setuid && ln a/x hard
"""


def _write_tree(arena: Arena) -> Seen:
    """Downloads names, links and modes of every kind and writes them to the host."""
    with TemporaryDirectory(dir=arena.place) as outer, arena.sandbox(Box(alone=True)) as box:
        made = box.commands.run(_STRANGE_TREE)
        if not made.ok:
            return Seen(False, made.stderr)
        box.files.download_dir("/workspace").write_to(Path(outer, "in"))
        beside = sorted(each.name for each in Path(outer).iterdir() if each.name != "in")
        entries = [Path(folder, name) for folder, _, names in os.walk(Path(outer, "in")) for name in names]
        bad = [each for each in entries if each.is_symlink() or each.stat().st_mode & 0o6111]
    found = [*beside, *map(str, bad)]
    return Seen(
        bool(found) or len(entries) < 5, "plain files, and nothing beside them" if not found else str(found)
    )


def _copy_tree(arena: Arena) -> Seen:
    with arena.sandbox(Box(alone=True)) as box:
        box.commands.run(f"{_STRANGE_TREE}\ncp -a /workspace /tmp/copy")
        found = box.commands.run("find /tmp/copy -type l -o -type p -o -perm /6000").stdout.splitlines()
    return Seen(len(found) >= 4, f"{len(found)} links, FIFOs and setuid files")


def _forged_names(*names: str) -> Callable[[Arena], Seen]:
    """What a sandbox whose init is not ours any more could answer. Open where a file lies outside then."""

    def deed(arena: Arena) -> Seen:
        with TemporaryDirectory(dir=arena.place) as outer:
            said = ""
            for name in names:
                try:
                    Download({name: b"x"}, {}, (), ()).write_to(Path(outer, "in"))
                except (InvalidArgument, ValueError, FileError) as error:
                    said = type(error).__name__
                    continue
                return Seen(True, f"{name} was written")
        return Seen(False, said)

    return deed


def _odd_file(make: str) -> Callable[[Arena], Seen]:
    """Reads something that would never end, or never begin."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(alone=True)) as box:
            box.commands.run(make)
            return Seen(True, f"read {len(box.files.read('odd'))} bytes")

    return deed


def _read_with_program(make: str) -> Callable[[Arena], Seen]:
    """A plain reader of the same waits until its time is over, or reads for ever."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(alone=True)) as box:
            box.commands.run(make)
            reason = box.commands.run("exec cat odd > /dev/null", timeout_s=1).reason
        return Seen(reason == "timeout", f"it ended by {reason}")

    return deed


_FIFO = "mkfifo odd"
_ZERO = "ln -s /dev/zero odd"
_SOCKET = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"odd\")'"


def _remove_everything(arena: Arena) -> Seen:
    """rm -rf of the root. Open where the next sandbox, or the neighbour, misses something."""
    with arena.sandbox(Box(alone=True)) as box:
        box.commands.run("rm -rf --no-preserve-root / 2>/dev/null; true", timeout_s=120)
        entries = {entry.name for entry in box.files.list("/")}
        runs = box.commands.run(["/usr/bin/env", "true"]).ok
    with arena.sandbox(Box(alone=True)) as later:
        whole = later.commands.run(
            "python3 -c 'import pytest' && test -d /workspace && test -s /etc/passwd"
        ).ok
    survived = {"usr", "etc", "proc"} <= entries and runs and whole
    return Seen(
        not survived, "image, toolkit and the next sandbox are whole" if survived else str(sorted(entries))
    )


def _remove_own(arena: Arena) -> Seen:
    with arena.sandbox(Box(alone=True)) as box:
        box.files.write("/workspace/mine", b"x")
        box.commands.run("rm -rf --no-preserve-root /workspace /tmp 2>/dev/null; true")
        gone = not box.files.exists("/workspace/mine")
    return Seen(gone, "what it may write to is gone")


def _mutual(arena: Arena) -> Seen:
    """A file of one sandbox, looked for from another."""
    with arena.sandbox(Box(alone=True)) as box:
        for folder in ("/workspace", "/tmp", "/root", "/var/tmp", "/dev/shm"):
            box.commands.run(f"echo x > {folder}/shared")
        found = [each for each in ("/workspace/shared", "/tmp/shared", "/root/shared", "/var/tmp/shared",
                                   "/dev/shm/shared") if arena.neighbour.files.exists(each)]  # fmt: skip
    return Seen(bool(found), f"arrived: {found}" if found else "nothing arrived")


def _own(arena: Arena) -> Seen:
    with arena.sandbox(Box(alone=True)) as box:
        box.commands.run("echo x > /workspace/shared")
        return Seen(box.files.exists("/workspace/shared"), "it is there")


def _plant(path: Path) -> None:
    """A program that would run as root, with a capability; what it does is to print what it was given."""
    shutil.copy("/usr/bin/cat", path)
    os.chown(path, 0, 0)  # first: it takes the others away
    path.chmod(0o4755)
    os.setxattr(path, "security.capability", _MAY_SEND_RAW)


def _gained(status: str) -> bool:
    """Whether /proc/self/status has another effective user than a real one, or a capability."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    real, effective, *_ = fields["Uid"].split()
    return real != effective or int(fields["CapPrm"], 16) != 0


def _from_snapshot(arena: Arena) -> Seen:
    """Setuid files and a capability: the sandbox's own, and such as only a host's root can have put there."""
    with arena.sandbox(Box(alone=True)) as box:
        made = box.commands.run("cp /usr/bin/cat own && chmod 6755 own && touch planted")
        if not made.ok:
            return Seen(False, made.stderr)
        snapshot = box.snapshot()
    try:
        tree = arena.state_dir / "snapshots" / snapshot.name / "tree"
        (planted,) = tree.rglob("planted")
        _plant(planted)
        with Sandbox.create(substrate=arena.substrate, snapshot=snapshot, state_dir=arena.state_dir,
                            toolkit=arena.toolkit) as box:  # fmt: skip
            seen = [box.commands.run(f"./{name} /proc/self/status") for name in ("own", "planted")]
    finally:
        snapshot.delete()
    if not all(each.ok for each in seen):
        return Seen(False, str(seen))
    gained = any(_gained(each.stdout) for each in seen)
    return Seen(gained, "more rights than its user" if gained else "they run, and gain nothing")


def _run_planted(arena: Arena) -> Seen:
    path = arena.open_place / "planted"
    _plant(path)
    try:
        words = [str(path), "/proc/self/status"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30,
                              user=_NOBODY, group=_NOBODY, extra_groups=())  # fmt: skip
    finally:
        path.unlink()
    return Seen(_gained(done.stdout), "runs as root, with a capability")


def _no_root() -> str:
    return "" if os.geteuid() == 0 else "only root can make a setuid file of root's"


CASES: tuple[Case, ...] = (
    Case(60, "read-link", "a link to a file of the host, read by the platform", _read_link,
         frozenset({"FileMissing"}), "init resolves every path inside",
         Shown(_write_through_link_outside, "followed on the host")),
    Case(60, "write-link", "a link to a file of the host, written by the platform", _write_link,
         frozenset({"FileMissing"}), "init resolves every path inside",
         Shown(_write_through_link_outside, "followed on the host")),
    Case(60, "download-link", "a link to a file of the host, in a folder that is downloaded", _download_link,
         frozenset({"the link as a link"}), "a download follows no link",
         Shown(_write_through_link_outside, "followed on the host")),
    Case(60, "upload-link", "a link to a file of the host, in a folder that is uploaded",
         _upload(lambda entry, secret: entry.symlink_to(secret)), frozenset({"arrived: []"}),
         "an upload leaves links out",
         Shown(_upload(lambda entry, secret: entry.write_bytes(secret.read_bytes())),
         "a copy instead of the link")),
    Case(62, "strange-tree", "names, links, modes and a FIFO that mean harm to who writes them down",
         _write_tree,
         frozenset({"plain files, and nothing beside them"}),
         "only files and folders are written, without modes",
         Shown(_copy_tree, "a copy that keeps everything")),
    Case(62, "forged-names", "names that lead out of the folder, from an init that is not ours any more",
         _forged_names("../escape", "/tmp/dockyard-escape", "a/../../escape"), frozenset({"InvalidArgument"}),
         "names are checked before anything is written",
         Shown(_forged_names("inside"), "a name that does not lead out")),
    Case(63, "zip-bomb", "32 MiB in a small archive",
         Probe("takes", "unpack", ("/workspace", "32"), Box(disk_mb=8)), _FULL,
         "disk limit; nothing is unpacked on the host", Raised(Box(disk_mb=64)), "contained"),
    Case(64, "read-fifo", "a FIFO as the file to download", _odd_file(_FIFO), frozenset({"UnsafePath"}),
         "opens do not block, and only regular files are read",
         Shown(_read_with_program(_FIFO), "read by cat")),
    Case(64, "read-device", "a device as the file to download", _odd_file(_ZERO), frozenset({"UnsafePath"}),
         "only regular files are read", Shown(_read_with_program(_ZERO), "read by cat")),
    Case(64, "read-socket", "a socket as the file to download", _odd_file(_SOCKET),
         frozenset({"UnsafePath", "FileError"}), "only regular files are read",
         NoControl("no reader of files can open a socket")),
    Case(67, "file-capability", "a capability on a program, to be found by who starts it later",
         _paths("capability_on_file", "/tmp/program"), frozenset({"EPERM"}), "no capability",
         Outside("namespace")),
    Case(67, "snapshot", "setuid files and a capability in a snapshot that sandboxes are made of",
         _from_snapshot, frozenset({"they run, and gain nothing"}),
         "no_new_privs, nosuid mounts, no capability in the bounds",
         Shown(_run_planted, "outside, as an ordinary user"), needs=_no_root),
    Case(69, "shared-layers", "files of the image, which others share", _paths("make_file", *_SHARED),
         frozenset({"EACCES", "EACCES EROFS", "EROFS"}), "read-only mounts, not its uid's to write, Landlock",
         Instead(("/workspace/planted",), "in the same sandbox, a file of /workspace")),
    Case(69, "writable-layers", "files of a sandbox, looked for from another", _mutual,
         frozenset({"nothing arrived"}), "a writable layer of its own",
         Shown(_own, "looked for from the same sandbox"), "contained"),
    Case(70, "remove-everything", "rm -rf --no-preserve-root /", _remove_everything,
         frozenset({"image, toolkit and the next sandbox are whole"}), "read-only mounts",
         Shown(_remove_own, "in the same sandbox, /workspace"), "contained"),
)  # fmt: skip
