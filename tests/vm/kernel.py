"""Debian's cloud kernel, unpacked and not installed: an image that QEMU boots, and its modules."""

import lzma
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

META = "linux-image-6.12-cloud-amd64"
_ZSTD = b"\x28\xb5\x2f\xfd"


class GuestError(Exception):
    """Says what is missing, and what to install."""


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    modules: Path  # /lib/modules/VERSION

    def module(self, name: str) -> bytes:
        """A module's object. GuestError where the kernel has none of that name."""
        for path in self.modules.rglob(f"{name}.ko*"):
            data = path.read_bytes()
            return lzma.decompress(data) if path.suffix == ".xz" else data
        raise GuestError(f"the kernel has no module {name}")


def fetch_kernel(folder: Path) -> Kernel:
    """From the package sources of this machine, once; seconds. Needs apt and zstd."""
    unpacked = folder / "kernel"
    if not (unpacked / "vmlinux").exists():
        unpacked.mkdir(parents=True, exist_ok=True)
        _unpack(_download(folder), unpacked)
    (modules,) = (unpacked / "lib" / "modules").iterdir()
    return Kernel(unpacked / "vmlinux", modules)


def _download(folder: Path) -> Path:
    depends = _run(["apt-cache", "depends", META])
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise GuestError(f"no package {META} here; the guest is Debian 12's kernel: apt-get update")
    _run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", found[1]], cwd=folder)
    return next(folder.glob("linux-image-*.deb"))


def _unpack(package: Path, target: Path) -> None:
    """Without acceleration a guest takes longer to unpack the image than to start."""
    _run(["dpkg-deb", "-x", str(package), str(target)])
    (packed,) = (target / "boot").glob("vmlinuz-*")
    data = packed.read_bytes()
    for start in (found.start() for found in re.finditer(re.escape(_ZSTD), data)):
        done = subprocess.run(["zstd", "-dc"], input=data[start:], capture_output=True, check=False)
        if done.stdout.startswith(b"\x7fELF"):
            (target / "vmlinux").write_bytes(done.stdout)
            return
    raise GuestError(f"{packed.name} holds no kernel packed by zstd")


def _run(words: list[str], cwd: Path | None = None) -> str:
    try:
        return subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise GuestError(f"{words[0]} is not installed here") from error
    except subprocess.CalledProcessError as error:
        raise GuestError(f"{' '.join(words[:2])}: {error.stderr.strip()}") from error
