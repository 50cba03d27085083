"""What root runs as a helper: nothing that others could change, whoever starts it."""

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sandbox.helper_start import PROGRAM, helper_words
from sandbox.places import EGRESS_OBJECT

NOBODY = 65534
REPOSITORY = PROGRAM.parents[1]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root runs the helper")


def run(words: list[object]) -> "subprocess.CompletedProcess[str]":
    """Where it is refused; a helper that starts would not end."""
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, timeout=60, cwd=REPOSITORY
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The helper's own files, where only root writes."""
    tmp_path.chmod(0o755)
    program = tmp_path / "sandbox" / "privileged"
    shutil.copytree(PROGRAM, program, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sandbox" / "egress").mkdir()
    shutil.copyfile(EGRESS_OBJECT, tmp_path / "sandbox" / "egress" / EGRESS_OBJECT.name)
    return program


@pytest.mark.parametrize("part", [".", "../egress/egress.bpf.o", "server.py", "networks.py", "__init__.py"])
def test_none_of_its_files_may_be_anothers(installed: Path, tmp_path: Path, part: str):
    """And what is another's has not been run by then."""
    marker = tmp_path / "ran"
    (installed / "server.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    os.chown(installed / part, NOBODY, NOBODY)
    words = helper_words(str(NOBODY), tmp_path / "helper.sock")
    done = run([*words[:3], installed, *words[4:]])
    assert (done.returncode, "can be changed by others" in done.stderr) == (2, True)
    assert str((installed / part).resolve()) in done.stderr
    assert not marker.exists()


def test_the_interpreter_may_not_be_anothers_nor_the_link_to_it(installed: Path, tmp_path: Path):
    theirs = tmp_path / "environment" / "bin"
    theirs.mkdir(parents=True)
    words = helper_words(str(NOBODY), tmp_path / "helper.sock")
    (theirs / "python3").symlink_to(words[0])
    os.chown(theirs.parent, NOBODY, NOBODY)
    done = run([theirs / "python3", "-I", "-S", installed, *words[4:]])
    assert (done.returncode, str(theirs.parent) in done.stderr) == (2, True)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with the project in it, by a .pth as an editable install has it."""
    tmp_path.chmod(0o755)
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (packages / "project.pth").write_text("\n".join([str(REPOSITORY), *site.getsitepackages()]) + "\n")
    return place


@pytest.mark.parametrize("part", ["", "pyvenv.cfg", "bin/python", "lib/*/site-packages/project.pth"])
@pytest.mark.parametrize("asked", [("--user", str(NOBODY)), ("--unit",)])
def test_the_command_refuses_an_environment_that_others_could_change(
    environment: Path, part: str, asked: tuple[str, ...]
):
    (chosen,) = environment.glob(part) if part else [environment]
    os.chown(chosen, NOBODY, NOBODY, follow_symlinks=False)
    done = run([environment / "bin" / "python", "-m", "cli.main", "node", "helper", *asked])
    assert done.returncode != 0
    assert f"{chosen} can be changed by others" in " ".join(done.stderr.split())


def test_the_command_looks_at_all_that_it_has_loaded(tmp_path: Path):
    """A module of the project's and one of a package's: both have run as root by then."""
    tmp_path.chmod(0o755)
    for name in ("protocol", "sandbox", "cli"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    os.chown(tmp_path / "protocol" / "errors.py", NOBODY, NOBODY)
    script = "import sandbox.helper_start as s; s.run_helper('65534')"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    assert "protocol/errors.py can be changed by others" in done.stderr
