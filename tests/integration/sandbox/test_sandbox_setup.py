"""What set-up makes, and what the doctor says of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandbox import Sandbox, doctor
from sandbox.audit import Leftover, check_integrity, sweep
from sandbox.doctor import probe
from sandbox.elf import read_dynamic, replace_run_path
from sandbox.errors import UnsupportedError
from sandbox.native.build import build, is_current
from sandbox.places import INIT_BINARY
from sandbox.toolkit import build_toolkit
from sandbox.toolkit import is_current as toolkit_is_current


def test_the_doctor_finds_what_the_other_tests_rely_on(state_dir: Path, toolkit: Path):
    found = {each.name: each for each in probe(state_dir=state_dir, toolkit=toolkit)}
    assert found["static init"].status == "enforced"
    assert found["toolkit"].status == "enforced"
    assert found["substrate function"].status == ("enforced" if os.geteuid() == 0 else "degraded")
    assert found["socket memory"].status == ("degraded" if os.geteuid() == 0 else "missing")
    for each in found.values():
        assert each.status == "enforced" or each.cost or each.fix, each
    audit = check_integrity(state_dir)
    assert (audit.live, audit.leftovers) == ((), ())


def test_the_doctor_names_what_is_missing_and_the_way_out(state_dir: Path, tmp_path: Path):
    found = {each.name: each for each in probe(state_dir=state_dir, toolkit=tmp_path / "absent")}
    assert found["toolkit"].status == "missing"
    assert f"--into {tmp_path / 'absent'}" in found["toolkit"].fix
    assert found["substrate function"].status == "unverified"


def test_the_doctor_finds_no_tool_on_an_empty_path(
    state_dir: Path, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {each.name: each.status for each in probe(state_dir=state_dir, toolkit=toolkit)}
    for name in ("bubblewrap", "crun", "runc", "substrate function", "substrate container"):
        assert found[name] == "missing", name


def test_capabilities_are_the_doctors(state_dir: Path, toolkit: Path):
    names = {each.name for each in Sandbox.capabilities(state_dir=state_dir, toolkit=toolkit)}
    assert {"user namespaces", "cgroup memory", "overlay"} <= names


_IN_WANT = """
import os, resource, signal, sys
from pathlib import Path
from sandbox.doctor import probe
if sys.argv[1] == "SIGCHLD":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
else:
    held = [os.open("/", os.O_RDONLY) for _ in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + int(sys.argv[1]), hard))
for each in probe(state_dir=Path(sys.argv[2]), toolkit=Path(sys.argv[3])):
    print(each.name, each.status, sep=": ")
"""


@pytest.mark.parametrize("want", ["SIGCHLD", "0", "3", "9"])
def test_the_doctor_raises_nothing_whatever_its_process_lacks(toolkit: Path, tmp_path: Path, want: str):
    """0, 3 and 9: descriptors that are left."""
    words = [sys.executable, "-c", _IN_WANT, want, str(tmp_path), str(toolkit)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 15
    assert "substrate function: enforced" not in done.stdout.splitlines()
    audit = check_integrity(tmp_path)
    assert (audit.live, audit.leftovers) == ((), ())


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups need root")
def test_a_sweep_beside_the_doctor_takes_nothing_away(state_dir: Path):
    taken: list[Leftover] = []
    is_over = threading.Event()

    def sweep_on() -> None:
        while not is_over.is_set():
            taken.extend(sweep(state_dir))

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        found = [doctor._cgroup("pids", state_dir) for _ in range(30)]
        found += [doctor._guard(state_dir) for _ in range(10)] if doctor.shared_guard() is not None else []
    finally:
        is_over.set()
        sweeper.join()
    assert taken == []
    assert {each.status for each in found} == {"enforced"}


def test_the_native_program_is_static_and_built_once(toolkit: Path):
    assert is_current()
    assert not build()
    assert read_dynamic(INIT_BINARY) is None


def test_what_runs_inside_stays_small_enough_to_read():
    """Whatever the mode `init` is made of, the header and what it shares with the launcher counted."""
    inside = ("main", "init", "command", "files", "processes", "landlock", "wire", "failing")
    others = ("nursery", "launch", "namespaces", "copy")
    native = INIT_BINARY.parent
    assert {path.stem for path in native.glob("*.c")} == {*inside, *others}, "say which mode a new file is of"
    files = (native / "dockyard.h", *(native / f"{name}.c" for name in inside))
    assert sum(len(path.read_text().splitlines()) for path in files) < 600


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["init"],
        ["nursery"],
        ["launch"],
        ["launch", "--control"],
        ["launch", "--what", "x"],
        ["launch", "--", "true"],
    ],
)
def test_the_native_program_refuses_what_it_does_not_know(toolkit: Path, arguments: list[str]):
    done = subprocess.run([INIT_BINARY, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert arguments == ["init"] or done.stderr.startswith("dockyard-init: ")


def test_without_a_compiler_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="no C compiler") as caught:
        build(tmp_path / "init")
    assert "gcc" in caught.value.hint


def test_a_toolkit_that_is_current_is_left_alone(toolkit: Path):
    before = toolkit.stat().st_ino
    assert toolkit_is_current(toolkit)
    assert not build_toolkit(toolkit)
    assert toolkit.stat().st_ino == before


def test_the_toolkit_works_where_it_was_not_made(toolkit: Path, tmp_path: Path):
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-a", toolkit.resolve(), moved], check=True)
    done = subprocess.run(
        [moved / "bin/python3", "-I", "-c", "import sys, pytest; print(sys.prefix, pytest.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    prefix, pytest_file = done.stdout.split()
    assert prefix == str(moved)
    assert pytest_file.startswith(str(moved))


def test_a_run_path_is_replaced_in_place(tmp_path: Path):
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "main"
    subprocess.run(["gcc", "-Wl,-rpath,/a/rather/long/path", "-o", program, source], check=True)
    size = program.stat().st_size
    assert replace_run_path(program, "$ORIGIN/../lib")
    dynamic = read_dynamic(program)
    assert dynamic is not None
    assert [text for _, text in dynamic.run_paths] == ["$ORIGIN/../lib"]
    assert "libc.so.6" in dynamic.needed
    assert program.stat().st_size == size
    subprocess.run([program], check=True)
    assert not replace_run_path(program, "/longer/than/what/is/there/now")


def test_what_is_no_elf_file_has_no_dynamic_section(tmp_path: Path):
    (tmp_path / "text").write_text("hello")
    assert read_dynamic(tmp_path / "text") is None
    assert not replace_run_path(tmp_path / "text", "/x")
