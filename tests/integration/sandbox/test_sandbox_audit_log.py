"""Every deed is in the audit log, and nothing that a command was given."""

import os
import secrets
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EMFILE, EPERM
from pathlib import Path

import pytest

from sandbox import Network, Policy, Sandbox
from sandbox.audit_log import FILE_NAME, entries, of_argv
from sandbox.errors import CapacityError, InvalidArgument, SandboxError, VersionConflict

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="freezing and networks need root")


def lines(state_dir: Path, box: Sandbox) -> list[dict]:
    return [each for each in entries(state_dir) if each["sandbox"] == box.id]


def deeds(state_dir: Path, box: Sandbox) -> list[str]:
    return [each["deed"] for each in lines(state_dir, box)]


def last(state_dir: Path, box: Sandbox, deed: str) -> dict:
    return [each for each in lines(state_dir, box) if each["deed"] == deed][-1]


@pytest.fixture
def blocked(create, state_dir: Path) -> Iterator[Sandbox]:
    """A sandbox whose log has become a link to a full disk."""
    box, log, kept = create(), state_dir / FILE_NAME, state_dir / "kept"
    log.rename(kept)
    log.symlink_to("/dev/full")
    yield box
    log.unlink()
    kept.rename(log)


@needs_root
def test_every_deed_is_in_the_log(create, state_dir: Path, egress):
    policy = Policy(network=Network(), phases={"work": Network()})
    box = create(policy=policy, egress=egress, labels={"team": "red\nblue"}, memory_mb=128)
    assert box.commands.run(["/usr/bin/true"]).ok
    endless = box.commands.start("sleep 60")
    endless.kill()
    endless.kill()
    assert endless.wait(30).reason == "killed"
    box.set_network("none", 1)
    box.enter_phase("work", 2)
    kept = box.snapshot("ready")
    child = box.fork_fs()
    kept.delete()
    child.kill()
    box.kill()
    box.kill()
    found = deeds(state_dir, box)
    assert found == [
        "create", "exec", "exec", "kill", "set_network", "set_network", "snapshot", "fork", "delete_snapshot",
        "kill", "end",
    ]  # fmt: skip
    assert deeds(state_dir, child) == ["create", "kill", "end"]
    created, forked = last(state_dir, box, "create"), last(state_dir, child, "create")
    assert (created["substrate"], created["labels"]) == ("function", {"team": "red\nblue"})
    assert created["limits"]["memory_bytes"] == 128 << 20
    assert created["owner"] == {"pid": os.getpid(), "uid": os.geteuid()}
    assert (created["made_from"], forked["made_from"]) == ("", box.id)
    assert last(state_dir, box, "set_network")["version"] == 3
    assert (
        last(state_dir, box, "snapshot")["name"] == last(state_dir, box, "delete_snapshot")["name"] == "ready"
    )
    assert last(state_dir, box, "fork")["into"] == child.id
    assert last(state_dir, box, "end")["reason"] == "killed"


def test_a_command_is_known_by_its_hash(box: Sandbox, state_dir: Path):
    words = ["/usr/bin/echo", "a", "b c"]
    command = box.commands.start(words)
    command.wait(30)
    line = last(state_dir, box, "exec")
    assert line == {**line, **of_argv(words), "command": command.id}
    assert (line["argc"], line["argv_bytes"]) == (3, len(b"/usr/bin/echo\0a\0b c"))


def test_no_secret_is_in_the_log(box: Sandbox, state_dir: Path):
    canary = f"canary-{secrets.token_hex(16)}"
    box.commands.run(f"cat; echo {canary}", env={"TOKEN": canary}, stdin=canary)
    with pytest.raises(InvalidArgument, match="cwd"):
        box.commands.run(["true", canary], cwd=f"/{canary}")
    assert deeds(state_dir, box) == ["create", "exec", "exec"]
    text = (state_dir / FILE_NAME).read_text()
    assert canary not in text
    assert "cat;" not in text


@needs_root
def test_a_change_that_fails_is_no_version(create, egress, state_dir: Path, monkeypatch):
    box = create(policy=Policy(network=Network()), egress=egress)

    def is_refused(*_: object) -> None:
        raise OSError(EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(egress.fence, "replace", is_refused)
        with pytest.raises(SandboxError, match="changing the network policy") as caught:
            box.set_network("none", 1)
    assert type(caught.value) is SandboxError
    assert box.network_version == 1
    written, undone = lines(state_dir, box)[-2:]
    assert undone == {**written, "at_s": undone["at_s"], "failed": "PermissionError"}
    assert box.set_network("none", 1) == 2
    box.kill()


@needs_root
def test_changes_at_one_time_are_logged_once_each(create, egress, state_dir: Path):
    box = create(policy=Policy(network=Network()), egress=egress)
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: _change(box, 1), range(8)))
    assert sorted(told) == [1] * 7 + [2]
    assert [each["version"] for each in lines(state_dir, box) if each["deed"] == "set_network"] == [2]
    box.kill()


def _change(box: Sandbox, expected: int) -> int:
    try:
        return box.set_network("none", expected)
    except VersionConflict:
        return expected


def test_a_command_that_could_not_start_is_in_it_as_such(create, state_dir: Path, monkeypatch):
    box = create()

    def is_full(*_: object) -> None:
        raise OSError(EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("sandbox.plumbing.memory_file", is_full)
        with pytest.raises(CapacityError):
            box.commands.run("true")
    first, second = (each for each in lines(state_dir, box) if each["deed"] == "exec")
    assert second == {**first, "at_s": second["at_s"], "failed": "OSError"}


def test_it_is_its_owners_to_read_alone(box: Sandbox, state_dir: Path):
    assert stat.S_IMODE((state_dir / FILE_NAME).stat().st_mode) == 0o600


def test_a_sandbox_that_ends_by_itself_is_in_it_with_the_reason(create, state_dir: Path):
    box = create(lifetime_s=0.05)
    box._channel.join(30)
    assert deeds(state_dir, box) == ["create", "end"]
    assert last(state_dir, box, "end")["reason"] == "expired"


def test_what_cannot_be_logged_is_not_done(blocked: Sandbox, create):
    with pytest.raises(SandboxError, match="starting a command"):
        blocked.commands.run("touch made")
    with pytest.raises(SandboxError, match="making a sandbox"):
        create()
    assert not blocked.files.exists("made")
    blocked.kill()
