"""A paused sandbox stands still, and goes on where it was."""

import errno
import os
import time

import pytest
from sandbox_internet import wait_until

from protocol.clock import SystemClock
from sandbox import cgroups
from sandbox.errors import CapacityError, SandboxGone, UnsupportedError

COUNT = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n; sleep 0.002; done"
unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
pytestmark = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here")


now_ns = SystemClock().now_ns


def ticks(box):
    """CPU time of all that is in it, as the kernel counts it."""
    return box._ownership.groups.unified.joinpath("cpu.stat").read_text().split("\n")[0]


def test_nothing_runs_while_it_is_paused(box):
    box.commands.start(COUNT)
    box.pause()
    assert box.is_paused
    before = ticks(box)
    time.sleep(0.05)
    assert ticks(box) == before
    box.pause()
    box.resume()
    box.resume()
    assert not box.is_paused
    time.sleep(0.05)
    assert ticks(box) != before


def test_one_that_is_killed_meanwhile_is_gone(box, monkeypatch: pytest.MonkeyPatch):
    freezer = box._life.freezer
    pause = freezer.pause

    def killed_before() -> None:
        box.kill()
        pause()

    monkeypatch.setattr(freezer, "pause", killed_before)
    with pytest.raises(SandboxGone, match="killed"):
        box.pause()
    assert not box.is_paused


def test_whatever_is_asked_of_it_ends_the_pause(box):
    command = box.commands.start("read -r line; echo $line", stdin=None)
    box.pause()
    assert box.commands.run("echo hi").stdout == "hi\n"
    box.pause()
    box.files.write("/workspace/a", "text")
    box.pause()
    assert box.files.read("/workspace/a") == b"text"
    box.pause()
    command.send_stdin("go\n")
    assert command.wait(20).stdout == "go\n"


def test_a_commands_time_stands_still(box):
    command = box.commands.start("sleep 60", timeout_s=0.4)
    box.pause()
    time.sleep(0.8)
    assert command.is_running
    box.resume()
    assert command.is_running
    assert command.wait(20).reason == "timeout"


def test_earlier_pauses_are_no_time_of_a_command_that_begins_or_is_ended_in_one(box):
    hour_ns = 3_600_000_000_000
    box._life.freezer._total_ns += hour_ns
    with box._life.held():
        command = box.commands.start("sleep 60", timeout_s=0.3)
        assert command._deadline_ns + box._life.paused_ns() - command._paused_before_ns < now_ns() + hour_ns
        command.kill()
        assert command._deadline_ns + box._life.paused_ns() - command._paused_before_ns < now_ns() + hour_ns
    assert command.wait(20).reason == "killed"


def test_what_could_not_be_asked_is_no_use_of_it(create, substrate, monkeypatch: pytest.MonkeyPatch):
    box = create(substrate=substrate, idle_s=0.3)

    def fail(*_: object, fds: tuple[int, ...] = (), **__: object) -> bool:
        """When its thread has looked for deadlines meanwhile."""
        for fd in fds:
            os.close(fd)
        box._channel.wake()
        time.sleep(0.1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(box._channel, "open", fail)
    with pytest.raises(CapacityError):
        box.files.read("/etc/passwd")
    wait_until(lambda: not box.is_running)
    box = create(substrate=substrate, idle_s=0.3)
    monkeypatch.setattr(box._channel, "open", fail)
    with pytest.raises(CapacityError):
        box.commands.run("true")
    wait_until(lambda: not box.is_running)


def test_a_command_can_be_ended_and_a_sandbox_killed_while_paused(box):
    command = box.commands.start(COUNT)
    box.pause()
    command.kill()
    assert command.wait(20).reason == "killed"
    command = box.commands.start(COUNT)
    box.pause()
    box.kill()
    assert command.wait(20).reason == "killed"
    with pytest.raises(SandboxGone):
        box.pause()


def test_the_lifetime_goes_on_and_the_idle_time_does_not(create, substrate):
    idle = create(substrate=substrate, idle_s=0.3)
    idle.pause()
    time.sleep(0.6)
    assert idle.is_running
    short = create(substrate=substrate, lifetime_s=0.5)
    short.pause()
    give_up = time.monotonic() + 20
    while short.is_running and time.monotonic() < give_up:
        time.sleep(0.01)
    with pytest.raises(SandboxGone) as gone:
        short.resume()
    assert gone.value.reason == "expired"


def test_without_the_freezer_it_is_refused(box, monkeypatch):
    monkeypatch.setattr(box._life.freezer, "_group", None)
    with pytest.raises(UnsupportedError, match="cgroup version 2"):
        box.pause()
