"""Published sources by hash: fetched once through pip, kept under their hash, unpacked in memory.

pip checks the hash before it does anything with a file, so nothing that is not pinned is ever run; it does
read the metadata of the pinned source with that source's own build backend.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from protocol.errors import DockyardError, InvalidInput
from teams.workspace import Tree

MAX_UNPACKED_BYTES = 64_000_000
MAX_FILES = 20_000


class FetchError(DockyardError):
    """A source could not be had: no network, no such version, or other bytes than pinned."""


class Sdist(BaseModel):
    """One published source archive."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: str = Field(pattern=r"^[0-9][A-Za-z0-9.!+-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def fetch_sdist(sdist: Sdist, cache_dir: Path, *, timeout_s: float = 300.0) -> Path:
    """The archive's path in the cache. Blocks; needs no network when the cache has it.

    Raises `FetchError`. A cached file whose bytes have changed is fetched again.
    """
    path = cache_dir / f"{sdist.sha256}.tar.gz"
    if path.is_file() and _sha256(path) == sdist.sha256:
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as folder:
        found = _download(sdist, Path(folder), timeout_s)
        found.replace(path)  # atomic: a reader sees a whole archive or none
    return path


def unpack(archive: Path) -> Tree:
    """The regular files of a source archive, without its one top folder.

    Raises `InvalidInput` for an archive that is none, that leads out of its folder, or that is too large.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                safe = tarfile.data_filter(member, "/workspace")
                total += safe.size
                if total > MAX_UNPACKED_BYTES or len(files) >= MAX_FILES:
                    raise InvalidInput(f"archive {archive.name} unpacks to too much")
                stream = tar.extractfile(member)
                if stream is not None:
                    files[safe.name.partition("/")[2] or safe.name] = stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InvalidInput(f"archive {archive.name} cannot be unpacked: {error}") from error
    return Tree(files)


def _download(sdist: Sdist, folder: Path, timeout_s: float) -> Path:
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{sdist.package}=={sdist.version} --hash=sha256:{sdist.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", str(pinned)]
    command += ["--dest", str(folder)]
    if importlib.util.find_spec("setuptools") is not None:
        command.append("--no-build-isolation")  # spares a second download
    what = f"{sdist.package} {sdist.version}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{what} did not arrive in {timeout_s:g} s", hint="is there a network?") from error
    archives = [path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".tgz"))]
    if done.returncode != 0 or len(archives) != 1:
        raise FetchError(
            f"pip could not fetch {what}: {_reason(done.stderr)}",
            hint="the first run needs the package registry, later ones the cache",
        )
    if _sha256(archives[0]) != sdist.sha256:
        raise FetchError(f"{what} has other bytes than its recipe pins", hint="check the recipe's sha256")
    return archives[0]


def _reason(stderr: str) -> str:
    # One line for a person, and no address of a registry: pip's errors carry it.
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    text = lines[-1] if lines else "no reason given"
    return re.sub(r"\w+://\S+", "<address>", text)[:300]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
