"""Tests under a kernel of Debian's, in a virtual machine: AppArmor, BPF LSM and unified cgroups are on there.

`python tests/vm/run.py [--folder DIR] [PYTEST ARGUMENTS]`. Needs qemu-system-x86, zstd, apparmor, gcc and
apt (`make vm` installs them as root), 40 MB of download the first time, no /dev/kvm. Prints the guest's
console and ends with 0, with 1 where a test failed, pytest broke or a guest hung or panicked, with 5 where no
test was chosen, and with 77 where no guest can be made here, which says nothing of the project.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from image import BEGUN, PROJECT, make_disk, make_initramfs
from kernel import GuestError, fetch_kernel

sys.path.insert(0, str(PROJECT))
from sandbox.egress.build import build as build_egress
from sandbox.errors import UnsupportedError
from sandbox.guard.build import build as build_guard
from sandbox.native.build import build
from sandbox.places import default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit

PATIENCE_S, EVERY_ATTACK_S = 1800.0, 3600.0  # emulated: machines differ by five times
# Guests of one processor: where several are emulated, one can trip over what another patches into the kernel.
LANES = 2
OK, NO_TESTS = 0, 5  # pytest's: chosen ones may all lie in the other lane
FAILED = 1
NOT_HERE = 77  # no guest can do this: it is the host that lacks something
BOOTS = 2  # an emulated processor now and then stops the kernel before its first program
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86", "zstd": "zstd", "apparmor_parser": "apparmor",
    "ps": "procps", "mke2fs": "e2fsprogs", "mkfs.xfs": "xfsprogs", "crun": "crun", "runc": "runc",
    "bwrap": "bubblewrap", "clang": "clang", "setpriv": "util-linux",
}  # fmt: skip
LSM = "landlock,lockdown,yama,integrity,apparmor,bpf"
MACHINE = [
    *(
        "qemu-system-x86_64",
        "-accel",
        "tcg",
        "-cpu",
        "max",
        "-smp",
        "1",
        "-M",
        "q35",
        "-m",
        "1280",
    ),
    *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=PROJECT / ".vm", help="kernel and disk; kept for the next run"
    )
    options, rest = parser.parse_known_args(arguments)
    started = time.monotonic()
    install()
    try:
        command = prepare(options.folder, shlex.join(rest))
    except GuestError as error:
        print(f"tests/vm: {error}", file=sys.stderr)
        return NOT_HERE
    print(f"guest ready after {time.monotonic() - started:.0f} s", flush=True)
    return run(command, EVERY_ATTACK_S if "--every-attack" in rest else PATIENCE_S)


def install() -> None:
    """What is missing, as root where apt is there. What it cannot install is missed, by name, later."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {', '.join(missing)}", flush=True)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)


def prepare(folder: Path, arguments: str) -> list[str]:
    """QEMU's command line."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build(), build_egress(), build_guard()
    except UnsupportedError as error:
        raise GuestError(f"{error}; {error.hint}") from error
    toolkit = default_toolkit(default_state_dir())
    build_toolkit(toolkit)
    kernel = fetch_kernel(folder)
    disk, initramfs = folder / "disk.img", folder / "initramfs"
    make_disk(kernel, toolkit, disk, arguments)
    make_initramfs(kernel, initramfs)
    line = f"console=ttyS0 quiet panic=-1 mitigations=off apparmor=1 lsm={LSM}"
    return [
        *MACHINE, "-kernel", str(kernel.image), "-initrd", str(initramfs), "-append", line,
        "-drive", f"file={disk},if=none,id=root,format=raw,cache=unsafe,snapshot=on",
        "-device", "virtio-blk-pci,drive=root",
    ]  # fmt: skip


def run(command: list[str], patience_s: float) -> int:
    """Boots a guest a lane, side by side; shows their consoles one after the other. The worst lane's code."""
    if shutil.which(command[0]) is None:
        print(f"tests/vm: {command[0]} is not installed here", file=sys.stderr)
        return NOT_HERE
    with ThreadPoolExecutor(LANES) as pool:
        codes = list(pool.map(lambda lane: run_lane(command, lane, patience_s), range(LANES)))
    return worst(codes)


def worst(codes: Iterable[int]) -> int:
    """A lane that failed is never hidden by one that did not, or that had nothing to do."""
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def run_lane(command: list[str], lane: int, patience_s: float) -> int:
    """The exit code of its tests, 1 where pytest broke or the guest did not come to its end."""
    own = [f"{word} DOCKYARD_LANE={lane}" if word.startswith("console=") else word for word in command]
    for _ in range(BOOTS):
        ended, console = boot(own, patience_s)
        print(f"lane {lane}\n{console}", flush=True)
        if ended is not None:
            return ended if ended in (OK, NO_TESTS) else FAILED
        print("tests/vm: the guest did not come to its end", file=sys.stderr)
        if BEGUN in console:
            break
    return FAILED


def boot(command: list[str], patience_s: float) -> tuple[int | None, str]:
    """One run of a guest and what it prints; None where its tests did not end."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as guest:
        patience = threading.Timer(patience_s, guest.kill)  # a guest that hangs says nothing
        patience.start()
        console = guest.communicate()[0].decode("utf-8", "replace").replace("\r", "")
        patience.cancel()
    found = re.search(r"guest ended with (\d+)", console)
    return (None if found is None else int(found[1])), console


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
