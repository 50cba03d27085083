"""The guest's disk and initramfs. The root is made of this machine's own programs and the libraries that they
name, the toolkit of sandboxes, and the project; no distribution is installed."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernel import GuestError, Kernel

PROJECT = Path(__file__).parent.parent.parent
PROGRAMS = (
    *(
        "bash",
        "sh",
        "cat",
        "ls",
        "mkdir",
        "rm",
        "mv",
        "cp",
        "ln",
        "chmod",
        "touch",
        "head",
        "sleep",
        "seq",
        "true",
    ),
    *(
        "dd",
        "mkfifo",
        "mknod",
        "truncate",
        "id",
        "env",
        "uname",
        "sync",
        "tr",
        "wc",
        "sort",
        "grep",
        "sed",
        "ps",
    ),
    *("mount", "umount", "unshare", "ip", "pgrep", "stty", "tty", "sha256sum", "false", "echo", "stat"),
    *("setpriv", "find", "date", "yes", "du"),
    *("bwrap", "crun", "runc", "apparmor_parser", "mke2fs", "mkfs.xfs"),
)
LOADED = ("libbpf.so.1",)  # by name while it runs, so no program names it
LIBRARIES = (
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions.py",
    "typing_inspection",
    "msgspec",
)
PACKAGES = ("sandbox", "protocol", "bench/attack_cases")
MODULES = (
    "virtio_blk",
    "overlay",
    "veth",
    "sch_ingress",
    "cls_bpf",
    "loop",
    "quota_tree",
    "quota_v2",
    "libcrc32c",
    "xfs",
    "binfmt_misc",
    "vsock",
)
_BLOCKS = 700 << 20
_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "dockyard-guest": "",
}
BEGUN = "guest begins its tests"
START = """\
#!/bin/bash
export PATH=/usr/sbin:/usr/bin HOME=/root LANG=C.UTF-8 TMPDIR=/var/tmp
export DOCKYARD_HOME=/var/dockyard PYTHONPATH=/project:/opt/site
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for place in /dev/shm /tmp /run; do mount -t tmpfs tmpfs $place; done
mount -t securityfs none /sys/kernel/security
mount -t cgroup2 none /sys/fs/cgroup
mount -t bpf none /sys/fs/bpf
# What Debian shuts for everybody: attacks are to meet the sandbox, not that.
echo 2 > /proc/sys/kernel/perf_event_paranoid
echo 1 > /proc/sys/dev/tty/legacy_tiocsti
ip link set lo up
mkdir /sys/fs/cgroup/first && echo $$ > /sys/fs/cgroup/first/cgroup.procs
cd /project
echo "{begun}"
/opt/toolkit/bin/python3 -B -m pytest -c /dev/null --rootdir /project -p no:cacheprovider \\
  -W error -rfEs --tb short --color no {arguments} /project/inside
echo "guest ended with $?"
sync; echo o > /proc/sysrq-trigger; sleep 9
"""


def make_disk(kernel: Kernel, toolkit: Path, target: Path, arguments: str = "") -> None:
    """An ext4 file system with everything that a run needs; seconds. `arguments` are pytest's."""
    root = target.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    for name in (
        "dev",
        "etc/alternatives",
        "home/someone",
        "mnt",
        "opt",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr/bin",
        "var/tmp",
    ):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    _copy_programs(root)
    shutil.copytree(toolkit.resolve(), root / "opt/toolkit", symlinks=True)
    _copy_project(root)
    _compile(root, toolkit)
    _copy_libraries(root, (root / "opt").rglob("*.so*"))
    for name, text in _FILES.items():
        (root / "etc" / name).write_text(text)
    (root / "start").write_text(START.format(arguments=arguments, begun=BEGUN))
    (root / "start").chmod(0o755)
    _run(["ldconfig", "-r", str(root)])
    target.unlink(missing_ok=True)
    with target.open("wb") as disk:
        disk.truncate(_BLOCKS)
    _run(["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(target)])
    shutil.rmtree(root)


def make_initramfs(kernel: Kernel, target: Path) -> None:
    """`start.c`, and the modules that it loads."""
    program = target.with_suffix(".start")
    _run(
        [
            "gcc",
            "-std=gnu11",
            "-static",
            "-O1",
            "-Wall",
            "-Werror",
            "-o",
            str(program),
            str(PROJECT / "tests/vm/start.c"),
        ]
    )
    files = [("init", 0o100755, program.read_bytes()), ("modules", 0o40755, b"")]
    for number, name in enumerate(MODULES):
        files.append((f"modules/{number}-{name}.ko", 0o100644, kernel.module(name)))
    target.write_bytes(b"".join(_cpio(*each) for each in (*files, ("TRAILER!!!", 0, b""))))


def _cpio(name: str, mode: int, data: bytes) -> bytes:
    """One member, as `newc` has it (early-userspace/buffer-format.rst in Linux's documentation)."""
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _copy_programs(root: Path) -> None:
    found = []
    for name in PROGRAMS:
        path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
        if path is None:
            raise GuestError(f"{name} is not installed here")
        found.append(Path(path))
    for path in found:
        place = "sbin" if "sbin" in path.parts else "bin"
        shutil.copy2(path.resolve(), root / "usr" / place / path.name)
    _copy_libraries(root, (*found, *map(_library, LOADED)))
    abi = Path("/etc/apparmor.d/abi")
    if abi.is_dir():
        shutil.copytree(abi, root / "etc/apparmor.d/abi")


def _copy_libraries(root: Path, programs: Iterable[Path]) -> None:
    """What the dynamic linker finds for them, under the names that it looks for; a library comes itself."""
    needed = {each for program in programs for each in (*_linked(program), *_itself(program, root))}
    for library in sorted(needed):
        inside = library.parts[2:] if library.parts[1] == "usr" else library.parts[1:]
        target = root.joinpath("usr", *inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(library.resolve(), target)


def _library(name: str) -> Path:
    """Where the dynamic linker has it."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = re.search(rf"{re.escape(name)} .*x86-64.* => (\S+)", listed)
    if found is None:
        raise GuestError(f"{name} is not installed here")
    return Path(found[1])


def _itself(program: Path, root: Path) -> tuple[Path, ...]:
    return (program,) if ".so" in program.name and root not in program.parents else ()


def _linked(program: Path) -> Iterator[Path]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    yield from map(Path, re.findall(r"(?:=> )?(/\S+) \(0x", listed))


def _copy_project(root: Path) -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    for name in LIBRARIES:
        source = site / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        (root / "opt/site").mkdir(exist_ok=True)
        copy(source, root / "opt/site" / name)
    bytecode = shutil.ignore_patterns("__pycache__")
    (root / "project/bench").mkdir(parents=True)
    shutil.copy2(PROJECT / "bench/__init__.py", root / "project/bench")
    for name in PACKAGES:
        shutil.copytree(PROJECT / name, root / "project" / name, ignore=bytecode)
    shutil.copytree(PROJECT / "tests/vm/inside", root / "project/inside", ignore=bytecode)


def _compile(root: Path, toolkit: Path) -> None:
    """So that an emulated processor need not: what it imports is some tens of thousands of lines."""
    words = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    places = [str(root / name) for name in ("project", "opt/site")]
    _run([str(toolkit.resolve() / "bin/python3"), *words, *places])


def _run(words: list[str]) -> None:
    """A program that fails is no lack of the host's: RuntimeError with its words."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise GuestError(f"{words[0]} is not installed here") from error
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]}: {(done.stderr or done.stdout).strip()}")
