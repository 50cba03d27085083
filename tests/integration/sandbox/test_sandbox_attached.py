"""A sandbox of another process is used through its owner, and by nobody else."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sandbox_owner import Owner, owned

from sandbox import AttachedSandbox, Policy, Sandbox, sandboxes
from sandbox.answers import answer
from sandbox.attached import Line
from sandbox.door import _MOST_AT_ONCE, ask
from sandbox.door_names import name_of
from sandbox.errors import (
    CapacityError,
    CommandError,
    CommandTimeout,
    FileMissing,
    FileTooLarge,
    InvalidArgument,
    PolicyDenied,
    SandboxError,
    SandboxGone,
)
from sandbox.files import Files
from sandbox.processes import this_process

Create = Callable[..., Sandbox]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="freezing needs root")
REPOSITORY = Path(__file__).parents[3]
CLIENT = """
import sys
from sandbox import sandboxes
box = sandboxes.attach(sys.argv[2], state_dir=sys.argv[1])
box.commands.run("echo $$ > /workspace/pid; exec sleep 600", timeout_s=600)
"""


@pytest.fixture
def other(tmp_path: Path, toolkit: Path) -> Iterator[Owner]:
    with owned(tmp_path, toolkit) as owner:
        yield owner


@pytest.fixture
def box(other: Owner, tmp_path: Path) -> AttachedSandbox:
    return sandboxes.attach(other.id, state_dir=tmp_path)


def test_commands_end_as_the_owners_do(box: AttachedSandbox):
    result = box.commands.run(
        "cat; echo $A$TOKEN; pwd; echo bad >&2; exit 3", stdin=b"\x00\xff", env={"A": "1"}, cwd="/tmp"
    )
    assert (result.exit_code, result.reason) == (3, "exit")
    assert (result.stdout_bytes, result.stderr) == (b"\x00\xff1canary\n/tmp\n", "bad\n")
    assert box.commands.run(["printf", "%s", "a b"]).stdout == "a b"
    assert box.commands.run("yes", output_bytes=100).truncated
    assert box.commands.run("sleep 60", timeout_s=0.1).reason == "timeout"


def test_output_is_handed_over_while_the_command_runs(box: AttachedSandbox):
    """The command waits for a file that is written when its first output has come."""
    out, err = list[str](), list[str]()

    def take(text: str) -> None:
        out.append(text)
        box.files.write("go", "")

    script = "printf 'a\\xff'; until [ -e go ]; do sleep 0.01; done; echo b; echo bad >&2"
    result = box.commands.run(script, on_stdout=take, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("a\ufffdb\n", "bad\n") == (result.stdout, result.stderr)


def test_what_a_watcher_raises_ends_the_command(box: AttachedSandbox):
    def refuse(text: str) -> None:
        raise BrokenPipeError(f"no more of {text!r}")

    with pytest.raises(BrokenPipeError, match="no more of 'x"):
        box.commands.run("echo $$ > pid; echo x; exec sleep 600", timeout_s=600, on_stdout=refuse)
    assert box.commands.run("while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done", timeout_s=30).ok
    with pytest.raises(InvalidArgument, match="on_stderr is of type int"):
        box.commands.run("true", on_stderr=5)  # pyright: ignore


def test_an_owner_that_tells_no_output_gives_what_it_kept(
    create: Create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """As one of an earlier version."""
    monkeypatch.setattr("sandbox.answers._tell_output", lambda tell, stream, data: None)
    out = list[str]()
    line = sandboxes.attach(create().id, state_dir=state_dir)
    assert line.commands.run("echo a", on_stdout=out.append).stdout == "".join(out) == "a\n"


def test_what_no_message_can_say_is_named(box: AttachedSandbox):
    with pytest.raises(InvalidArgument, match="cmd"):
        box.commands.run(["echo", b"x"])  # pyright: ignore
    with pytest.raises(InvalidArgument, match="path"):
        box.files.read(b"/etc/passwd")  # pyright: ignore
    with pytest.raises(InvalidArgument, match="cwd"):
        box.commands.run("true", cwd=Path("/"))  # pyright: ignore


def test_errors_are_the_owners(box: AttachedSandbox):
    with pytest.raises(CommandError) as failed:
        box.commands.run("exit 3", check=True)
    assert (failed.value.exit_code, failed.value.sandbox_id) == (3, box.id)
    with pytest.raises(CommandTimeout):
        box.commands.run("sleep 60", timeout_s=0.1, check=True)
    with pytest.raises(FileMissing) as missing:
        box.files.read("/nothing")
    assert (missing.value.path, missing.value.errno, missing.value.sandbox_id) == ("/nothing", 2, box.id)
    for kind, do in (
        (PolicyDenied, lambda: box.commands.run("true", timeout_s=601)),
        (InvalidArgument, lambda: box.commands.run("true", cwd="/nowhere")),
        (InvalidArgument, lambda: box.commands.run([])),
        (InvalidArgument, lambda: box.set_timeout(-1)),
        (InvalidArgument, lambda: box.files.write("a", bytes((16 << 20) + 1))),
    ):
        with pytest.raises(SandboxError) as caught:
            do()
        assert type(caught.value) is kind


def test_files_go_both_ways(box: AttachedSandbox):
    content = bytes(range(256)) * 4096
    box.files.write("deep/a", content, mode=0o600)
    assert box.files.read("deep/a") == content
    (entry,) = box.files.list("deep")
    assert (entry.name, entry.type, entry.size, entry.mode & 0o777) == ("a", "file", len(content), 0o600)
    box.files.rename("deep/a", "b")
    assert (box.files.exists("deep/a"), box.files.exists("b")) == (False, True)
    box.files.make_dir("c/d")
    box.files.remove("c")
    assert {each.name for each in box.files.list()} == {"deep", "b"}
    with pytest.raises(FileTooLarge):
        box.files.read("b", max_bytes=10)
    box.files.write("\udcff", b"")
    assert "\udcff" in {each.name for each in box.files.list()}


def test_arguments_of_no_use_are_the_callers(box: AttachedSandbox):
    for timeout_s in (-100, float("nan"), float("inf"), "x"):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            box.commands.run("true", timeout_s=timeout_s)  # pyright: ignore
    with pytest.raises(InvalidArgument, match="cmd"):
        box.commands.run(5)  # pyright: ignore
    with pytest.raises(InvalidArgument, match="max_bytes"):
        box.files.read("a", max_bytes="1")  # pyright: ignore
    with pytest.raises(InvalidArgument, match="data of 31457280 bytes"):
        box.files.write("a", "€" * (10 << 20))
    with pytest.raises(InvalidArgument, match="more than 32 MiB"):
        box.commands.run("cat", stdin=b"x" * (30 << 20))
    assert box.commands.run("echo alive").stdout == "alive\n"


def test_it_is_timed_paused_and_ended(box: AttachedSandbox, other: Owner):
    assert box.set_timeout(900, idle_s=90).idle_s == 90
    if os.geteuid() == 0:
        box.pause()
        assert box.get_info().state == "paused"
        box.resume()
    assert box.get_info().state == "running"
    box.kill()
    assert other.line() == "killed killed"
    for do in (box.kill, box.get_info, lambda: box.commands.run("true")):
        with pytest.raises(SandboxGone) as caught:
            do()
        assert caught.value.reason == "killed"


ENDS_WITH_IT = """
import sys, threading
from sandbox import Sandbox, answers
kill = answers._DEEDS["kill"]
def answer_late(box, words):
    found = kill(box, words)
    threading.main_thread().join()  # the process has nothing else to do
    return found
answers._DEEDS["kill"] = answer_late
with Sandbox.create(state_dir=sys.argv[1], toolkit=sys.argv[2]) as box:
    running = box.commands.start("sleep 600")
    print(box.id, flush=True)
    running.wait()
"""


def test_an_owner_that_ends_with_its_sandbox_answers_first(tmp_path: Path, toolkit: Path):
    """As `dockyard sandbox run` does."""
    words = [sys.executable, "-c", ENDS_WITH_IT, str(tmp_path), str(toolkit)]
    with subprocess.Popen(words, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        sandbox_id = owner.stdout.readline().strip()
        assert sandboxes.kill(sandbox_id, state_dir=tmp_path).id == sandbox_id
    assert owner.returncode == 0


def test_when_the_owner_is_killed_its_sandbox_is_lost(box: AttachedSandbox, other: Owner):
    """To whoever waits for a command meanwhile, and to whoever asks later."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.commands.run, "touch begun; sleep 600", timeout_s=600)
        box.commands.run("until [ -e begun ]; do sleep 0.01; done")
        other.process.kill()
        for ask_it in (lambda: waiting.result(60), lambda: box.commands.run("true"), box.get_info):
            with pytest.raises(
                SandboxGone, match=f"ended with its owner, process {other.process.pid}"
            ) as caught:
                ask_it()
            assert (caught.value.reason, caught.value.sandbox_id) == ("lost", other.id)


def test_a_command_ends_with_whoever_asked_for_it(box: AttachedSandbox, other: Owner, tmp_path: Path):
    words = [sys.executable, "-c", CLIENT, str(tmp_path), other.id]
    with subprocess.Popen(words, cwd=REPOSITORY) as client:
        box.commands.run("until [ -s pid ]; do sleep 0.01; done")
        assert box.commands.run("kill -0 $(cat pid)").ok
        client.send_signal(signal.SIGKILL)
    assert box.commands.run("while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done", timeout_s=30).ok


def test_both_may_use_it_at_once(create: Create, state_dir: Path):
    own = create()
    line = sandboxes.attach(own.id, state_dir=state_dir)  # by the door, though it is this process's
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: said.append(line.commands.run(f"echo {n}").stdout))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    assert [own.commands.run(f"echo {n}").stdout for n in range(20)] == [f"{n}\n" for n in range(20)]
    for thread in threads:
        thread.join()
    assert sorted(said) == sorted(f"{n}\n" for n in range(20))


def test_many_that_wait_do_not_keep_it_from_being_ended(create: Create, state_dir: Path, monkeypatch):
    """As long as there is a place; beyond that whoever asks is told to come again."""
    own = create(pids=400, policy=Policy(max_timeout_s=600))
    line = sandboxes.attach(own.id, state_dir=state_dir)
    threads = [
        threading.Thread(target=lambda: line.commands.run("sleep 600", timeout_s=600)) for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    while len(own.commands.list()) < len(threads):
        assert own.is_running
    assert line.get_info().state == "running"
    line.kill()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(threads) < _MOST_AT_ONCE


@needs_root
def test_a_pause_is_no_silence(create: Create, state_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sandbox.attached._SOON_S", 0.5)  # of silence, in the place of half a minute
    monkeypatch.setattr("sandbox.door._BEAT_S", 0.05)
    monkeypatch.setattr("sandbox.answers._LOOK_S", 0.02)
    own = create()
    line = sandboxes.attach(own.id, state_dir=state_dir)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(
            line.commands.run, "until [ -e go ]; do sleep 0.01; done; echo on", timeout_s=0.9
        )
        while not own.commands.list():
            assert own.is_running
        own.pause()
        with pytest.raises(TimeoutError):
            result.result(2)
        assert own.is_paused
        own.files.write("/workspace/go", "")
        assert result.result(20).stdout == "on\n"


@pytest.mark.parametrize(
    ("do", "words"), [("write", ("a", b"")), ("make_dir", ("a",)), ("remove", ("b",)), ("rename", ("b", "c"))]
)
def test_what_its_owner_may_try_for_long_is_waited_for(
    create: Create, state_dir: Path, monkeypatch: pytest.MonkeyPatch, do: str, words: tuple[object, ...]
):
    own, do_it = create(), getattr(Files, do)
    own.files.write("b", "")
    attached = sandboxes.attach(own.id, state_dir=state_dir)
    inner = inspect.unwrap(Line.ask)
    monkeypatch.setattr(inner, "__defaults__", (0.2,))  # of silence, in the place of half a minute

    def take_long(*args: Any, **more: Any) -> Any:
        threading.Event().wait(0.5)
        return do_it(*args, **more)

    monkeypatch.setattr(Files, do, take_long)
    getattr(attached.files, do)(*words)


@needs_root
def test_whoever_leaves_a_paused_sandbox_lets_it_be(create: Create, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sandbox.answers._LOOK_S", 0.02)
    own = create()
    words = {"cmd": "sleep 600", "timeout_s": 600, "cwd": "/", "env": {}, "output_bytes": None, "stdin": ""}
    found: list[bool] = []

    def has_left() -> bool:
        if not found:
            own.pause()
        found.append(own.is_paused)
        if len(found) == 3:
            own.resume()
        return True

    assert answer(own, "commands.run", words, has_left)["reason"] == "killed"
    assert found[:3] == [True] * 3


def test_beyond_what_it_can_answer_it_says_so(
    create: Create, state_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    own = create()
    room = sandboxes._door._room
    taken = 0
    while room._free.acquire(blocking=False):
        taken += 1
    try:
        with pytest.raises(CapacityError, match="as many others as it can") as caught:
            sandboxes.attach(own.id, state_dir=state_dir)
        assert caught.value.retryable
    finally:
        for _ in range(taken):
            room._free.release()
    assert sandboxes.attach(own.id, state_dir=state_dir).id == own.id


@pytest.mark.parametrize(
    "words",
    [
        {"cmd": None}, {"cmd": 7}, {"env": []}, {"env": "A=1"}, {"timeout_s": "5"}, {"timeout_s": True},
        {"output_bytes": 1.5}, {"stdin": 5}, {"cwd": None},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_another_kind_are_refused(create: Create, state_dir: Path, words: dict[str, object]):
    own = create()
    usual = {"cmd": "true", "timeout_s": None, "cwd": "/", "env": {}, "output_bytes": None, "stdin": ""}
    line = Line(own.id, state_dir, this_process())
    with pytest.raises(SandboxError):
        line.ask("commands.run", **{**usual, **words})
    assert line.ask("commands.run", **usual)["exit_code"] == 0


@pytest.mark.parametrize(
    "do", ["__class__", "commands", "commands.start", "_release", "files", "set_network", ""]
)
def test_only_what_is_named_is_done(create: Create, state_dir: Path, do: str):
    own = create()
    with pytest.raises(SandboxError, match="no request"):
        ask(this_process(), {"do": do, "id": own.id, "state_dir": str(state_dir)})
    assert own.is_running


def test_an_answer_has_an_end(create: Create, state_dir: Path, monkeypatch: pytest.MonkeyPatch):
    line = sandboxes.attach(create().id, state_dir=state_dir)
    monkeypatch.setattr("sandbox.door._MAX_ANSWER_BYTES", 2000)
    with pytest.raises(InvalidArgument, match="answer has more than"):
        line.commands.run("head -c 3000 /dev/zero")
    assert line.commands.run("echo on").stdout == "on\n"


SEEK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as door:
    try:
        door.connect("\\0" + sys.argv[1])
        print("open")
    except OSError as error:
        print(error.strerror)
"""


def test_no_sandbox_finds_the_door(create: Create, substrate: str):
    """Its name is one of the host's network namespace."""
    words = ["python3", "-c", SEEK, name_of(this_process())[1:]]
    assert create(substrate=substrate).commands.run(words).stdout == "Connection refused\n"
    outside = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
    assert outside.stdout == "open\n"


FORK = """
import os, sys
from sandbox import Sandbox, sandboxes
from sandbox.errors import UnsupportedError
state, toolkit = sys.argv[1:]
with Sandbox.create(state_dir=state, toolkit=toolkit) as box:
    child = os.fork()
    if child == 0:
        try:
            Sandbox.connect(box.id, state_dir=state)
        except UnsupportedError:
            print(sandboxes.attach(box.id, state_dir=state).commands.run("echo asked").stdout, end="")
        with Sandbox.create(state_dir=state, toolkit=toolkit) as own:
            print([each.owner_pid == os.getpid() for each in sorted(
                Sandbox.list(state_dir=state), key=lambda each: each.id != own.id)], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(box.commands.run("echo own").stdout, end="")
"""


def test_a_forked_process_asks_its_parent(tmp_path: Path, toolkit: Path):
    words = [sys.executable, "-c", FORK, str(tmp_path), str(toolkit)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["asked", "[True, False]", "own"], done.stderr
