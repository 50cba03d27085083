"""What a signal handler raises comes wherever the main thread is: here once at each place where it can come,
and nothing is lost, left over or harmed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_internet import wait_until
from sandbox_interrupts import at_each_place, interrupted_twice

from sandbox import Sandbox, Snapshots, audit, cgroups
from sandbox.results import CommandResult

unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
needs_freezer = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here")


def test_files_survive(box: Sandbox):
    def use() -> None:
        box.files.write("a/file", "text")
        box.files.rename("a/file", "b/file")
        assert box.files.read("b/file") == b"text"
        assert [each.name for each in box.files.list("b")] == ["file"]
        box.files.remove("b")

    for _ in at_each_place(use):
        assert box.is_running
        box.files.write("b/file", "text")


def test_commands_end(box: Sandbox):
    def use() -> None:
        assert box.commands.run("cat", stdin="x").stdout == "x"

    for _ in at_each_place(use):
        assert box.commands.list() == ()
    assert box.is_running


def test_a_command_that_nobody_has_yet_ends_too(box: Sandbox):
    for _ in at_each_place(lambda: box.commands.start("sleep 1000").kill()):
        for command in box.commands.list():  # of which its caller knew
            command.end()
        assert box.is_running


def test_a_command_that_is_waited_for_goes_on(box: Sandbox):
    command = box.commands.start("cat", stdin=None)

    def use() -> None:
        command.send_stdin("x")
        assert command.is_running
        with pytest.raises(TimeoutError):
            command.wait(0.001)

    count = 0
    for _ in at_each_place(use):
        count += 1
    command.close_stdin()
    result: CommandResult = command.wait(20)
    assert result.stdout.strip("x") == ""
    assert 1 <= len(result.stdout) <= count + 1


def test_a_create_leaves_nothing(state_dir: Path, toolkit: Path, create: Callable[..., Sandbox]):
    def use() -> None:
        Sandbox.create(state_dir=state_dir, toolkit=toolkit).kill()

    for _ in at_each_place(use):
        for left in Sandbox.list(state_dir=state_dir):  # it was there, and its end was interrupted
            Sandbox.connect(left.id, state_dir=state_dir).kill()
    assert audit.check_integrity(state_dir) == audit.Audit((), ())


def test_an_end_can_be_told_again(create: Callable[..., Sandbox]):
    boxes = [create()]

    def use() -> None:
        boxes[-1].kill()

    for _ in at_each_place(use):
        use()
        boxes.append(create())


@needs_freezer
def test_a_snapshot_or_fork_that_nobody_has_yet_is_none(box: Sandbox, state_dir: Path):
    box.files.write("file", "text")
    for _ in at_each_place(lambda: box.snapshot("interrupted")):
        assert Snapshots(state_dir).list() == ()
    Snapshots(state_dir).delete("interrupted")
    for _ in at_each_place(lambda: box.fork_fs().kill()):
        for left in {each.id for each in Sandbox.list(state_dir=state_dir)} - {box.id}:
            Sandbox.connect(left, state_dir=state_dir).kill()
    assert box.commands.run("cat file").stdout == "text"


def test_a_command_ends_wherever_a_second_interrupt_comes(box: Sandbox):
    number = 1
    while interrupted_twice(0.3, number, lambda: box.commands.run("exec sleep 599")):
        number += 1
        wait_until(lambda: "599" not in box.commands.run("cat /proc/*/cmdline | tr '\\0' ' '").stdout)
    assert number > 1
