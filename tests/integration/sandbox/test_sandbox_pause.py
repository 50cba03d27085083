"""A paused sandbox stands still, and goes on where it was."""

import time

import pytest

from sandbox import cgroups
from sandbox.errors import SandboxGone, UnsupportedError

COUNT = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n; sleep 0.002; done"
unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)
pytestmark = pytest.mark.skipif(unified is None, reason="no cgroup version 2 here")


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
