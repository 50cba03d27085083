"""A user who is not root: a place where he can read what sandboxes need, programs of his, and the helper for
him."""

import importlib.metadata
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sandbox_internet import Internet, wait_until

from sandbox.egress import namespaces
from sandbox.helper_start import Bounds, helper_words

NOBODY = 65534
REPOSITORY = Path(__file__).parents[3]
_PACKAGES = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")


class User:
    """Runs programs as that user. `state` is his to write to."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.state, self.socket = root / "home" / "state", root / "helper.sock"
        self.python = root / "toolkit" / "bin" / "python3"

    def words(self, script: str, *arguments: object) -> dict[str, Any]:
        """Arguments of `subprocess` for a program in Python that gets these, after state and toolkit."""
        words = [self.python, "-B", "-c", script, self.state, self.root / "toolkit", *arguments]
        return {
            "args": list(map(str, words)),
            "env": {
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONPATH": str(self.root / "lib"),
                "HOME": str(self.home),
                "DOCKYARD_HELPER": str(self.socket),
            },
            "user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": self.home, "text": True,
        }  # fmt: skip

    def run(self, script: str, *arguments: object, inside: Internet | None = None) -> Any:
        """What the program prints, as JSON."""
        words = self.words(script, *arguments)
        done = _in(inside, lambda: subprocess.run(**words, capture_output=True, check=False))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @contextmanager
    def start(
        self, script: str, *arguments: object, inside: Internet | None = None
    ) -> Iterator["subprocess.Popen[str]"]:
        """A program that goes on until its input ends."""
        words = {**self.words(script, *arguments), "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = _in(inside, lambda: subprocess.Popen(**words))
        with process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def helped(
        self, *, inside: Internet | None = None, ends_well: bool = True, bounds: Bounds | None = None
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """The helper runs meanwhile, in that network, and ends well unless it is said to be killed."""
        words = helper_words(str(NOBODY), self.socket, bounds or Bounds())
        process = _in(inside, lambda: subprocess.Popen(words))
        with process:
            try:
                wait_until(lambda: process.poll() is not None or self.socket.exists())
                yield process
            finally:
                process.terminate()
        if ends_well:
            assert process.returncode == 0
            assert not self.socket.exists()


def groups_of_user() -> list[Path]:
    """Folders of cgroups that the helper has handed over, in every tree."""
    return sorted(Path("/sys/fs/cgroup").glob(f"*/dockyard/u{NOBODY}x*"))


def _in(inside: Internet | None, action: Callable[[], Any]) -> Any:
    return action() if inside is None else namespaces.run_in(inside.namespace, action)


@pytest.fixture(scope="module")
def user(toolkit: Path) -> Iterator[User]:
    """Somewhere that anybody can read, with copies of what a program of his needs. Seconds of copying, so
    for all tests of a file."""
    root = Path(tempfile.mkdtemp(prefix="dockyard-test-"))
    root.chmod(0o755)
    shutil.copytree(toolkit, root / "toolkit", symlinks=True)
    for name in ("protocol", "sandbox"):
        shutil.copytree(REPOSITORY / name, root / "lib" / name)
    for name in _PACKAGES:
        for file in importlib.metadata.distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = root / "lib" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    (root / "home").mkdir()
    os.chown(root / "home", NOBODY, NOBODY)
    for path in (root / "lib").rglob("*"):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    yield User(root)
    shutil.rmtree(root)


BEGIN = r"""
import json, os, sys
from pathlib import Path
from sandbox import Policy, Sandbox
from sandbox.audit import check_integrity
state, toolkit = Path(sys.argv[1]), sys.argv[2]
"""


def asked(process: "subprocess.Popen[str]") -> Any:
    """What it says to an empty line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return said(process)


def said(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0], "it says nothing"
    line = process.stdout.readline()
    assert line, "it has ended"
    return json.loads(line)
