"""The attack suite as an ordinary user whose sandboxes root's helper serves: what root does for that."""

import importlib.metadata
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.attack_cases import world
from bench.attack_cases.folders import Folder
from sandbox.egress import namespaces
from sandbox.errors import UnsupportedError
from sandbox.helper_start import find_uid, helper_words
from sandbox.places import default_state_dir, default_toolkit

_REPOSITORY = Path(__file__).parent.parent
_OURS = ("protocol", "sandbox", "bench")
_THEIRS = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "psutil")
_PATIENCE_S, _STEP_S = 20.0, 0.05


def run_as(user: str, words: Sequence[str]) -> int:
    """Runs `bench.attacks` with these words as that user, a name or a number, and returns its exit code. Its
    helper, and the network that networked sandboxes are connected to, are root's, and end with it; so does
    all that was made. UnsupportedError without root, InvalidArgument for no ordinary user."""
    if os.geteuid() != 0:
        raise UnsupportedError("--user starts a helper, which needs root", hint="run it as root")
    uid = find_uid(user)
    folder = Folder()
    root = folder.path
    try:
        root.chmod(0o755)
        _fill(root, uid)
        with world.served(root / "asked") as namespace, _helped(root / "helper.sock", uid, namespace):
            words = [*words, "--lent-world", str(root / "asked")]
            # In that network, as a user's programs are in the one that his helper connects sandboxes to.
            return namespaces.run_in(namespace, lambda: _run(root, uid, words))
    finally:
        folder.remove()


def _run(root: Path, uid: int, words: Sequence[str]) -> int:
    python = root / "home" / "dockyard" / "toolkit" / "bin" / "python3"
    return subprocess.run(
        [str(python), "-B", "-m", "bench.attacks", *words],
        check=False, cwd=root / "home", env=_environment(root), extra_groups=[], user=uid, group=_group(uid),
    ).returncode  # fmt: skip


def _environment(root: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(root / "lib"),
        "HOME": str(root / "home"),
        "DOCKYARD_HOME": str(root / "home" / "dockyard"),
        "DOCKYARD_HELPER": str(root / "helper.sock"),
    }


def _fill(root: Path, uid: int) -> None:
    """With what a program of that user's can read, whoever may read the originals."""
    home = root / "home" / "dockyard"
    home.mkdir(parents=True)
    shutil.copytree(default_toolkit(default_state_dir()).resolve(), home / "toolkit", symlinks=True)
    for name in _OURS:
        shutil.copytree(_REPOSITORY / name, root / "lib" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _THEIRS:
        for file in importlib.metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = root / "lib" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    for path in (root / "lib").rglob("*"):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    for path in (root / "home", home):
        os.chown(path, uid, _group(uid))


@contextmanager
def _helped(place: Path, uid: int, namespace: int) -> Generator[None]:
    """The helper runs meanwhile, in that network. UnsupportedError where it does not come up."""
    words = helper_words(str(uid), place)
    with namespaces.run_in(namespace, lambda: subprocess.Popen(words)) as helper:
        try:
            give_up = time.monotonic() + _PATIENCE_S
            while helper.poll() is None and not place.exists() and time.monotonic() < give_up:
                time.sleep(_STEP_S)
            if not place.exists():
                raise UnsupportedError("the helper did not start", hint=f"try {' '.join(words)}")
            yield
        finally:
            helper.terminate()


def _group(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid
