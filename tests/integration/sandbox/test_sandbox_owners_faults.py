"""What goes wrong with one command on its owner's side ends that command, not the sandbox."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from sandbox import Sandbox, plumbing
from sandbox.audit import check_integrity
from sandbox.audit_log import entries
from sandbox.errors import CapacityError, SandboxError
from sandbox.refusals import Attempt
from sandbox.wire import TerminalSize


def test_a_terminal_that_no_descriptor_is_left_for_is_one_commands_end(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    def dup(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    other = box.commands.start("read -r line; echo $line", stdin=None)
    with monkeypatch.context() as patch:
        patch.setattr(plumbing.os, "dup", dup)
        command = box.commands.start("sleep 600", terminal=TerminalSize(), stdin=None)
        with pytest.raises(CapacityError, match="serving a command"):
            command.wait()
    other.send_stdin("alive\n")
    assert other.wait().stdout == "alive\n"
    assert box.commands.start("echo hi", terminal=TerminalSize()).wait().stdout == "hi\r\n"


def test_a_fault_of_the_owners_is_one_commands_end(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    other = box.commands.start("read -r line; echo $line", stdin=None)
    command = box.commands.start("read -r line; echo $line; sleep 600", stdin=None)

    def add(stream: int, data: bytes) -> None:
        raise LookupError("a fault")

    assert command._plumbing is not None
    monkeypatch.setattr(command._plumbing, "_take", add)
    command.send_stdin("go\n")
    with pytest.raises(SandboxError, match="serving a command failed: LookupError"):
        command.wait()
    other.send_stdin("alive\n")
    assert other.wait().stdout == "alive\n"


def test_what_may_live_on_stays_sealed_and_confined(create, state_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Where a group is not let go of; and what is given back is, whatever another thing raises."""
    box = create()
    ownership, given_back = box._ownership, list[object]()

    class Watched:
        forget = staticmethod(given_back.append)

        def refused(self, sandbox: int) -> dict[Attempt, int]:
            return {}

    def hold() -> NoReturn:
        raise CapacityError("a cgroup is still in use")

    ownership._guard, ownership._sealed = Watched(), 7
    monkeypatch.setattr(ownership._profiles, "release", given_back.append)
    monkeypatch.setattr(ownership, "_remove_layer", lambda: given_back.append("layer"))
    with monkeypatch.context() as patch:
        patch.setattr(ownership.groups, "remove", hold)
        with pytest.raises(CapacityError, match="still in use"):
            box.kill()
    assert given_back == ["layer"]
    ownership.release(None)
    assert given_back == ["layer", 7, box.id, "layer"]
    box._release_error = None  # which the fixture's kill would raise again


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()])
def test_a_sandbox_whose_refusals_cannot_be_counted_ends_in_full(
    create, state_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    box = create()

    def refused() -> NoReturn:
        raise error

    monkeypatch.setattr(box._ownership, "refused", refused)
    with pytest.raises(CapacityError if isinstance(error, OSError) else MemoryError):
        box.kill()
    audit = check_integrity(state_dir)
    assert (audit.live, audit.leftovers) == ((), ())
    (end,) = [each for each in entries(state_dir) if (each["sandbox"], each["deed"]) == (box.id, "end")]
    assert (end["reason"], end["refused"]) == ("killed", None)
    box._release_error = None  # which the fixture's kill would raise again
