"""Running commands."""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

import pytest

from sandbox import Policy, Sandbox, sandboxes
from sandbox.channel import Channel
from sandbox.errors import CapacityError, InvalidArgument, SandboxGone

needs_cgroups = pytest.mark.skipif(os.geteuid() != 0, reason="memory cgroups need root")


def test_output_and_exit_code_come_back(box: Sandbox):
    result = box.commands.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert (result.exit_code, result.reason, result.truncated, result.denials) == (3, "exit", False, ())
    assert not result.ok


def test_a_sequence_is_run_without_a_shell(box: Sandbox):
    assert box.commands.run(["printf", "%s|", "a b", "$HOME", "*"]).stdout == "a b|$HOME|*|"


def test_the_toolkit_runs_python_and_pytest(box: Sandbox):
    box.files.write(
        "/workspace/test_it.py",
        "import yaml\ndef test_it():\n    assert yaml.safe_load('a: 1') == {'a': 1}\n",
    )
    result = box.commands.run("python3 -V && python3 -m pytest -q test_it.py")
    assert result.ok, result.stdout
    assert result.stdout.startswith("Python 3.")
    assert "1 passed" in result.stdout


def test_environment_is_ours_plus_the_callers(box: Sandbox):
    result = box.commands.run("env", env={"GREETING": "hello there", "HOME": "/workspace"})
    lines = set(result.stdout.splitlines())
    assert {"GREETING=hello there", "HOME=/workspace"} <= lines
    assert any(line.startswith("PATH=/opt/toolkit/bin:") for line in lines)


def test_an_empty_environment_keeps_the_path(box: Sandbox):
    assert box.commands.run("python3 -c 'print(1)'", env={}).stdout == "1\n"


def test_cwd(box: Sandbox):
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(InvalidArgument, match="cwd: No such file"):
        box.commands.run("pwd", cwd="/absent")


def test_a_missing_program_is_127_as_in_a_shell(box: Sandbox):
    result = box.commands.run(["/no/such/program"])
    assert (result.exit_code, result.reason) == (127, "exit")
    assert "cannot run the program" in result.stderr


def test_a_file_that_is_no_program_is_126(box: Sandbox):
    assert box.commands.run(["/etc/passwd"]).exit_code == 126


def test_a_signal_is_told_from_an_exit(box: Sandbox):
    result = box.commands.run("kill -TERM $$")
    assert (result.exit_code, result.reason) == (128 + 15, "signal")


def test_bytes_pass_unchanged(box: Sandbox):
    data = bytes(range(256)) * 5 + b"\x1b[31m\0\xff\xfe"
    result = box.commands.run(["cat"], stdin=data)
    assert result.stdout_bytes == data


def test_input_larger_than_every_buffer_arrives(box: Sandbox):
    result = box.commands.run("wc -c", stdin=b"x" * 3_000_000)
    assert result.stdout.strip() == "3000000"


def test_a_program_that_reads_no_input_ends_nevertheless(box: Sandbox):
    assert box.commands.run("true", stdin=b"x" * 3_000_000).ok


def test_without_input_standard_input_is_empty(box: Sandbox):
    assert box.commands.run(["cat"]).stdout_bytes == b""


@pytest.mark.parametrize(
    "script",
    [
        "cat <<'END'\n$HOME `x` \"quoted'\nEND\n",
        "printf '%s' 'a\"b'\\''c'",
        "for i in 1 2 3; do echo $i; done | tac",
        "echo -e 'a\\tb\\0c'",
    ],
)
def test_scripts_reach_the_shell_as_they_are(box: Sandbox, script: str):
    expected = subprocess.run(
        ["/bin/bash", "-c", script], capture_output=True, check=True, env={"HOME": "/root"}
    )
    assert box.commands.run(script).stdout_bytes == expected.stdout


def test_a_background_child_that_holds_the_pipe_does_not_hold_the_result(box: Sandbox):
    result = box.commands.run("sleep 1000 & echo started", timeout_s=60)
    assert (result.stdout, result.reason) == ("started\n", "exit")


def test_commands_run_side_by_side(box: Sandbox):
    """Each waits for the one before it to say so, so they can only end if all of them run."""
    names = [f"/tmp/step{index}" for index in range(8)]
    commands = [
        box.commands.start(f"until [ -e {before} ]; do sleep 0.01; done; touch {after}")
        for before, after in pairwise(names)
    ]
    box.commands.run(["touch", names[0]])
    assert all(command.wait().ok for command in commands)


def test_threads_may_share_a_sandbox(box: Sandbox):
    outputs: dict[int, str] = {}

    def run(index: int) -> None:
        outputs[index] = box.commands.run(f"echo {index}").stdout

    threads = [threading.Thread(target=run, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {index: f"{index}\n" for index in range(12)}


def test_a_started_command_can_be_killed(box: Sandbox):
    command = box.commands.start("sleep 1000")
    with pytest.raises(TimeoutError):
        command.wait(0.01)
    command.kill()
    result = command.wait()
    assert (result.reason, result.exit_code) == ("killed", 137)
    command.kill()  # once more: nothing happens


def test_what_is_only_started_runs_until_it_is_killed(create):
    """The policy's `timeout_s` is for what somebody waits for; `max_timeout_s` bounds both."""
    box = create(policy=Policy(timeout_s=0.3))
    server, session = box.commands.start("sleep 1000"), box.sessions.create().start("sleep 1000")
    assert box.commands.run("sleep 1000").reason == "timeout"
    assert box.sessions.create().run("sleep 1000").reason == "timeout"
    assert (
        sandboxes.attach(box.id, state_dir=box._made.order.state_dir).commands.run("sleep 9").reason
        == "timeout"
    )
    assert set(box.commands.list()) == {server, session}
    server.kill()
    assert server.wait(20).reason == "killed"
    bounded = create(policy=Policy(max_timeout_s=0.3)).commands.start("sleep 1000")
    assert bounded.wait(20).reason == "timeout"


EAT = ["python3", "-c", "x = bytearray(500 << 20)"]


@needs_cgroups
def test_what_fails_beside_a_command_without_memory_fails_by_itself(create):
    box = create(memory_mb=64)
    beside = box.commands.start("until [ -e go ]; do sleep 0.01; done; exit 1")
    eaten, by_a_shell = box.commands.run(EAT), box.commands.run(f'{EAT[0]} -c "{EAT[2]}"; exit $?')
    assert [each.reason for each in (eaten, by_a_shell)] == ["oom", "oom"]
    box.files.write("/workspace/go", "")
    result = beside.wait(20)
    assert (result.reason, result.exit_code) == ("exit", 1)
    assert [each.limit for each in result.denials] == ["memory"]  # counted for the sandbox, as it says


@needs_cgroups
def test_what_fails_alone_upon_a_process_without_memory_says_so(create):
    eaten = create(memory_mb=64).commands.run(f"{EAT[0]} -c '{EAT[2]}' || exit 1")
    assert (eaten.reason, eaten.exit_code) == ("oom", 1)


@pytest.mark.parametrize("way", ["commands", "session"])
def test_an_interrupt_ends_what_is_waited_for(create, way: str):
    box = create()
    run = box.commands.run if way == "commands" else box.sessions.create().run
    main = threading.get_ident()

    def interrupt(_: str) -> None:
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run("echo; sleep 1000", timeout_s=600, on_stdout=interrupt)
    assert box.commands.list() == ()
    assert box.commands.run("true").ok


def test_a_future_that_somebody_cancels_hides_no_command(create):
    """Not by hand, nor by asyncio, which cancels what it waits for."""
    box = create()
    timed, killed = box.commands.start("sleep 1000", timeout_s=0.3), box.commands.start("sleep 1000")
    assert not timed.future.cancel()
    assert not killed.future.cancel()
    assert set(box.commands.list()) == {timed, killed}
    killed.kill()
    assert (killed.wait(20).reason, timed.wait(20).reason) == ("killed", "timeout")


@pytest.mark.parametrize(
    ("cmd", "options"),
    [
        ("", {"timeout_s": 0}),
        ("true", {"timeout_s": -1}),
        ("true", {"timeout_s": float("nan")}),
        ([], {}),
        ([""], {}),
        ("a\0b", {}),
        ("true", {"env": {"A=B": "x"}}),
        ("true", {"output_bytes": -1}),
        (["true", "x" * 2_000_000], {}),
    ],
)
def test_bad_arguments_are_refused_and_the_sandbox_lives(create, cmd, options):
    box = create()
    with pytest.raises(InvalidArgument):
        box.commands.run(cmd, **options)
    assert box.commands.run("true").ok


def test_no_error_has_what_may_be_secret(create, state_dir, toolkit):
    box, secret = create(), "s3cret-key\ud800"
    session, other = box.sessions.create(), sandboxes.attach(box.id, state_dir=state_dir)
    fed = box.commands.start("cat", stdin=None)
    for refused in (
        lambda: box.commands.run("true", env={"TOKEN": secret}),
        lambda: box.commands.run("true", env={"TOKEN=s3cret-key": ""}),
        lambda: box.commands.run("true", stdin=secret),
        lambda: box.commands.run(["", "--token", "s3cret-key"]),
        lambda: box.commands.run(["echo", "--token", secret]),
        lambda: box.commands.run(f"echo {secret}"),
        lambda: session.run(f"echo {secret}"),
        lambda: fed.send_stdin(secret),
        lambda: box.files.write("/workspace/f", secret),
        lambda: other.commands.run("true", env={"TOKEN": secret}),
        lambda: other.commands.run("true", stdin=secret),
        lambda: other.files.write("/workspace/f", secret),
        lambda: Sandbox.create(state_dir=state_dir, toolkit=toolkit, env={"TOKEN": secret}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            refused()
        assert "s3cret" not in str(caught.value.record())
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    fed.kill()
    assert box.commands.run("true").ok


def test_killing_the_sandbox_ends_its_commands(box: Sandbox):
    command = box.commands.start("sleep 1000")
    box.kill()
    assert command.wait().reason == "killed"
    with pytest.raises(SandboxGone, match="was killed by its owner") as caught:
        box.commands.run("true")
    assert caught.value.reason == "killed"
    with pytest.raises(SandboxGone):
        box.files.read("/etc/passwd")
    box.kill()


def test_a_command_does_not_inherit_what_its_owner_ignores(create: Callable[..., Sandbox], substrate: str):
    """Whoever is started in the background ignores Ctrl-C; what runs in a sandbox does not."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        box = create(substrate=substrate)
    finally:
        signal.signal(signal.SIGINT, before)
    assert box.commands.run("trap 'echo taken' INT; kill -INT $$").stdout == "taken\n"


def test_input_that_nobody_can_wait_with_goes_on_with_the_next_call(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    counting = box.commands.start("until [ -e go ]; do sleep 0.01; done; wc -c", stdin=None, timeout_s=30)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "watch", fail)
        for _ in range(2):
            with pytest.raises(CapacityError, match="sending input"):
                counting.send_stdin(bytes(1 << 19))
        with pytest.raises(CapacityError, match="closing the input"):
            counting.close_stdin()
    counting.close_stdin()
    box.files.write("go", "")
    assert int(counting.wait().stdout) == 1 << 20
