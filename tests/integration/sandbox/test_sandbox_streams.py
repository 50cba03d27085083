"""Output as it comes, input while it runs, terminals, and commands found again."""

import asyncio
import threading
from functools import partial

import pytest

from sandbox import AsyncSandbox, Policy, TerminalSize
from sandbox.aio_commands import AsyncRunningCommand
from sandbox.errors import InvalidArgument


def test_output_is_handed_over_while_the_command_runs(box):
    """The command waits for input that is sent when its first output has come."""
    seen, came = [], threading.Event()

    def take(text):
        seen.append(text)
        came.set()

    command = box.commands.start('echo ready; read -r x; echo "got $x"', stdin=None, on_stdout=take)
    assert came.wait(20)
    command.send_stdin("it\n")
    assert command.wait().stdout == "ready\ngot it\n" == "".join(seen)


def test_pieces_never_split_a_character(box):
    pieces = []
    script = "import os, time\nfor b in 'aé漢🙂'.encode(): os.write(1, bytes([b])); time.sleep(0.002)"
    result = box.commands.run(["python3", "-c", script], on_stdout=pieces.append)
    assert "".join(pieces) == "aé漢🙂" == result.stdout


def test_streams_are_told_apart_and_bad_bytes_are_replaced(box):
    out, err = [], []
    box.commands.run(r"printf 'a\xff'; printf 'b\xe6' >&2", on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("a\ufffd", "b\ufffd")


def test_a_program_that_cannot_be_run_is_told_too(box):
    err = []
    result = box.commands.run(["/no/such"], on_stderr=err.append)
    told = "dockyard: cannot run the program '/no/such': No such file or directory\n"
    assert "".join(err) == result.stderr == told


def test_what_a_watcher_raises_ends_the_command(box):
    def refuse(text):
        raise RuntimeError(f"no more of {text!r}")

    with pytest.raises(RuntimeError, match="no more of 'x"):
        box.commands.run("echo x; sleep 60", on_stdout=refuse)
    assert box.commands.list() == ()


def test_input_may_be_sent_in_pieces_and_then_ended(box):
    command = box.commands.start(["sha256sum"], stdin=None)
    for _ in range(40):
        command.send_stdin(b"x" * 100_000)
    command.close_stdin()
    command.close_stdin()
    whole = box.commands.run(["sha256sum"], stdin=b"x" * 4_000_000)
    assert command.wait().stdout == whole.stdout
    with pytest.raises(InvalidArgument, match="stdin of this command is closed"):
        command.send_stdin("more")


def test_a_command_can_be_found_again(box):
    command = box.commands.start("read -r x; echo $x", stdin=None)
    assert [each.id for each in box.commands.list()] == [command.id]
    box.commands.connect(command.id).send_stdin("y\n")
    assert command.wait().stdout == "y\n"
    with pytest.raises(InvalidArgument, match=f"id={command.id}: no such command runs"):
        box.commands.connect(command.id)


def test_a_terminal_is_one_with_the_size_that_was_asked_for(box):
    script = "tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; echo $TERM"
    result = box.commands.start(script, terminal=TerminalSize(30, 100)).wait()
    name, *rest = result.stdout.replace("\r\n", "\n").splitlines()
    assert name.startswith("/dev/pts/")
    assert rest == ["30 100", "all", "xterm-256color"]


def test_a_terminal_takes_typing_signals_and_a_new_size(box):
    printed, ready = [], threading.Event()

    def take(text):
        printed.append(text)
        if "ready" in text:
            ready.set()

    traps = "trap 'stty size' WINCH; trap 'echo; echo interrupted; exit 3' INT"
    script = f"{traps}; echo ready; while :; do sleep 0.02; done"
    command = box.commands.start(script, stdin=None, terminal=TerminalSize(), on_stdout=take)
    assert ready.wait(20)
    command.resize(TerminalSize(11, 22))
    while "11 22" not in "".join(printed):
        pass
    command.send_stdin("\x03")
    result = command.wait()
    assert (result.reason, result.exit_code) == ("exit", 3)
    assert "interrupted" in result.stdout


def test_terminals_are_given_back(box):
    """More than there are at a time."""
    for _ in range(80):
        assert box.commands.start(["true"], terminal=TerminalSize()).wait().ok


def test_a_bad_size_is_refused(box):
    with pytest.raises(InvalidArgument, match="terminal: rows"):
        box.commands.start("true", terminal=TerminalSize(70_000, 1))


def test_watchers_of_asyncio_run_in_its_loop(state_dir, toolkit):
    async def scene():
        seen = []
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            result = await box.commands.run(
                "seq 1000", on_stdout=lambda text: seen.append((text, threading.current_thread()))
            )
            assert "".join(text for text, _ in seen) == result.stdout
            assert {thread for _, thread in seen} == {threading.main_thread()}
            command = await box.commands.start("cat", stdin=None)
            await command.send_stdin("a")
            await command.close_stdin()
            assert (await command.wait()).stdout == "a"

    asyncio.run(scene())


def test_what_a_watcher_of_asyncio_raises_ends_the_command(state_dir, toolkit):
    def refuse(text):
        raise RuntimeError(f"no more of {text!r}")

    async def scene():
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            with pytest.raises(RuntimeError, match="no more of 'x"):
                await box.commands.run("echo x; sleep 60", on_stdout=refuse)
            session = await box.sessions.create()
            with pytest.raises(RuntimeError, match="no more of 'y"):
                await session.run("echo y >&2; sleep 60", on_stderr=refuse)
            command = await box.commands.start("echo z", on_stdout=refuse)  # which ends by itself
            with pytest.raises(RuntimeError, match="no more of 'z"):
                await command.wait()
            assert await box.commands.list() == ()

    asyncio.run(scene())


async def wait_for_it(text):
    await asyncio.sleep(0)


class Waiting:
    async def __call__(self, text):
        await asyncio.sleep(0)


ASYNCHRONOUS = [wait_for_it, partial(wait_for_it), Waiting(), Waiting().__call__]


@pytest.mark.parametrize("watcher", [*ASYNCHRONOUS, "no function"])
def test_a_watcher_that_would_have_to_be_awaited_is_refused_by_name(box, watcher):
    for name in ("on_stdout", "on_stderr"):
        with pytest.raises(InvalidArgument, match=name):
            box.commands.run("touch ran", **{name: watcher})
        with pytest.raises(InvalidArgument, match=name):
            box.sessions.create().run("touch ran", **{name: watcher})
    with pytest.raises(InvalidArgument, match="asynchronous"):
        box.commands.run("echo x; sleep 60", on_stdout=lambda text: wait_for_it(text + "."))
    assert box.commands.list() == ()
    assert not box.files.exists("ran")


def test_a_watcher_of_asyncio_that_would_have_to_be_awaited_is_refused_by_name(state_dir, toolkit):
    async def scene():
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            session = await box.sessions.create()
            for watcher in ASYNCHRONOUS:
                for start in (box.commands.run, box.commands.start, session.run, session.start):
                    with pytest.raises(InvalidArgument, match="on_stderr"):
                        await start("touch ran", on_stderr=watcher)
            with pytest.raises(InvalidArgument, match="asynchronous"):
                await box.commands.run("echo x; sleep 60", on_stdout=lambda text: wait_for_it(text + "."))
            assert not await box.files.exists("ran")

    asyncio.run(scene())


def test_a_watcher_that_has_nothing_more_to_give_ends_the_command(box):
    def stop(text):
        raise StopIteration

    async def scene():
        watched = AsyncSandbox(box)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(watched.commands.run("echo x; sleep 60", on_stdout=stop), 30)
        command = box.commands.start("echo x; sleep 60", on_stdout=stop)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(AsyncRunningCommand(command).wait(), 30)

    asyncio.run(scene())
    with pytest.raises(RuntimeError, match="StopIteration"):
        box.commands.run("echo x; sleep 60", on_stdout=stop)


def test_a_total_of_output_is_exact_however_many_print(create, substrate):
    """Beside others that print as fast as they can, to slow watchers: never a byte more, never one less."""
    box = create(substrate=substrate, policy=Policy(output_bytes=1 << 20, output_total_bytes=1 << 20))
    limit, seen = 1 << 20, [[] for _ in range(6)]
    commands = [
        box.commands.start(["head", "-c", str(limit + number % 2), "/dev/zero"], on_stdout=each.append)
        for number, each in enumerate(seen)
    ]
    endless = box.commands.start("yes & yes >&2")
    for number, command in enumerate(commands):
        result = command.wait()
        assert result.reason == ("exit" if number % 2 == 0 else "output_limit")
        assert sum(map(len, seen[number])) == len(result.stdout_bytes) == limit
    result = endless.wait()
    assert result.reason == "output_limit"
    assert len(result.stdout_bytes) + len(result.stderr_bytes) == limit
    assert [denial.limit for denial in result.denials] == ["output"]
