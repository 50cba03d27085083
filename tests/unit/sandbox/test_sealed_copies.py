"""Programs as files in memory that nobody can change."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.sealed import sealed_copy


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return Path(shutil.copy("/bin/true", tmp_path / "program"))


def test_a_copy_is_the_program_and_runs(program: Path):
    fd = sealed_copy(str(program))
    assert fd is not None
    assert os.pread(fd, 1 << 24, 0) == program.read_bytes()
    assert not os.get_inheritable(fd)
    assert subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd], check=False).returncode == 0


def test_nobody_changes_it(program: Path):
    fd = sealed_copy(str(program))
    assert fd is not None
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 1 << 24),
    ):
        with pytest.raises(PermissionError):
            change()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # a right of the file's owner, and worth nothing
    with pytest.raises(PermissionError):
        os.write(again, b"x")
    os.close(again)


def test_there_is_one_until_the_program_is_replaced(program: Path):
    first = sealed_copy(str(program))
    assert sealed_copy(str(program)) == first
    shutil.copy("/bin/false", program.with_name("new"))
    program.with_name("new").replace(program)
    second = sealed_copy(str(program))
    assert second != first
    assert second is not None
    assert subprocess.run([f"/proc/self/fd/{second}"], pass_fds=[second], check=False).returncode == 1


def test_a_program_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="absent"):
        sealed_copy(str(tmp_path / "absent"))


def test_a_kernel_that_runs_no_files_in_memory_gets_none(program: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise PermissionError(13, "vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert sealed_copy(str(program)) is None
