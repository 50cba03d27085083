"""Each class of the error tree is raised by something that really happens."""

import asyncio
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sandbox_internet import WEB
from sandbox_places import count_fds

from sandbox import AsyncSandbox, Network, Policy, Sandbox
from sandbox.errors import (
    AuthError,
    CapacityError,
    CommandError,
    CommandTimeout,
    Conflict,
    FileError,
    FileMissing,
    FileTooLarge,
    InvalidArgument,
    NoSpace,
    OutputLimit,
    PathDenied,
    PolicyDenied,
    QuotaError,
    RequestTimeout,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    StartError,
    UnsafePath,
    UnsupportedError,
    VersionConflict,
    classes,
)

NOBODY = 65534
NOT_ONE = "sbx-000000000000000"


@dataclass
class Scene:
    """What an action needs: makers of sandboxes, and whatever else the tests have by name."""

    request: pytest.FixtureRequest
    create: Callable[..., Sandbox]
    state_dir: Path

    @property
    def monkeypatch(self) -> pytest.MonkeyPatch:
        return self.request.getfixturevalue("monkeypatch")


def is_out_of_descriptors(scene: Scene) -> None:
    box = scene.create()
    box.commands.run("true")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count_fds() - 1, before[1]))
    try:
        box.commands.run("true")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def asks_as_somebody_else(scene: Scene) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    scene.create()
    os.seteuid(NOBODY)
    try:
        Sandbox.list(state_dir=scene.state_dir)
    finally:
        os.seteuid(0)


def fills_its_processes(scene: Scene) -> None:
    box = scene.create(pids=8)
    for _ in range(8):
        box.commands.start("sleep 60")
    box.commands.run("true")


def updates_another_version(scene: Scene) -> None:
    box = scene.request.getfixturevalue("connect")(WEB)
    box.set_network(Network(), expected_version=7)


def repeats_a_key_with_another_order(scene: Scene) -> None:
    scene.create(key="errors-1", memory_mb=64)
    scene.create(key="errors-1", memory_mb=128)


def starts_with_a_broken_tool(scene: Scene) -> None:
    broken = scene.request.getfixturevalue("tmp_path") / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    scene.monkeypatch.setattr("sandbox.substrates.function.shutil.which", lambda name: str(broken))
    scene.create(substrate="function")


def asks_of_a_killed_one(scene: Scene) -> None:
    box = scene.create()
    box.kill()
    box.commands.run("true")


def waits_no_longer(scene: Scene) -> None:
    scene.create().commands.start("sleep 60").wait(0.01)


def reads_a_pipe(scene: Scene) -> None:
    box = scene.create()
    box.commands.run("mkfifo pipe")
    box.files.read("pipe")


def reads_more_than_it_takes(scene: Scene) -> None:
    box = scene.create()
    box.files.write("a", b"123")
    box.files.read("a", max_bytes=2)


def writes_where_its_policy_does_not_let_it(scene: Scene) -> None:
    scene.create(policy=Policy(read_only=("/var/tmp",))).files.write("/var/tmp/a", b"")


REAL: dict[type[SandboxError], Callable[[Scene], Any]] = {
    InvalidArgument: lambda scene: scene.create(memory_mb=0),
    UnsupportedError: lambda scene: scene.create(substrate="container", runtime="no-such-runtime"),
    CapacityError: is_out_of_descriptors,
    AuthError: asks_as_somebody_else,
    QuotaError: fills_its_processes,
    VersionConflict: updates_another_version,
    Conflict: repeats_a_key_with_another_order,
    StartError: starts_with_a_broken_tool,
    SandboxNotFound: lambda scene: Sandbox.connect(NOT_ONE, state_dir=scene.state_dir),
    SandboxGone: asks_of_a_killed_one,
    RequestTimeout: waits_no_longer,
    CommandError: lambda scene: scene.create().commands.run("exit 3", check=True),
    CommandTimeout: lambda scene: scene.create().commands.run("sleep 60", timeout_s=0.1, check=True),
    OutputLimit: lambda scene: scene.create(policy=Policy(output_total_bytes=9)).commands.run(
        "yes", check=True
    ),
    PolicyDenied: lambda scene: scene.create(policy=Policy(max_timeout_s=1)).commands.run(
        "true", timeout_s=2
    ),
    PathDenied: writes_where_its_policy_does_not_let_it,
    FileError: lambda scene: scene.create().files.read("/workspace"),
    FileMissing: lambda scene: scene.create().files.read("nothing"),
    FileTooLarge: reads_more_than_it_takes,
    UnsafePath: reads_a_pipe,
    NoSpace: lambda scene: scene.create(disk_mb=1).files.write("a", bytes(4 << 20)),
}
NOT_HERE: dict[type[SandboxError], str] = {
    SandboxError: "needs a process that the kernel does not freeze, or an init that breaks its protocol",
}


@pytest.fixture
def scene(request: pytest.FixtureRequest, state_dir: Path) -> Scene:
    if os.geteuid() == 0:
        request.getfixturevalue("internet")  # for the session, so before `create` counts descriptors
    return Scene(request, request.getfixturevalue("create"), state_dir)


def test_every_class_is_raised_here_or_has_a_reason():
    assert {*REAL, *NOT_HERE} == set(classes())
    assert not REAL.keys() & NOT_HERE.keys()


@pytest.mark.parametrize("kind", REAL, ids=lambda kind: kind.__name__)
def test_it_is_raised_by_what_really_happens(kind: type[SandboxError], scene: Scene):
    with pytest.raises(SandboxError) as caught:
        REAL[kind](scene)
    assert type(caught.value) is kind
    assert caught.value.message
    assert caught.value.node == os.uname().nodename


def test_asyncio_raises_the_same(scene: Scene, toolkit: Path):
    sync: list[SandboxError] = []
    box = scene.create(pids=40)
    for do in (
        lambda: scene.create(memory_mb=0),
        lambda: box.files.read("nothing"),
        lambda: box.commands.run("exit 3", check=True),
        lambda: box.commands.run("sleep 9", timeout_s=0.05, check=True),
        lambda: Sandbox.connect(NOT_ONE, state_dir=scene.state_dir),
    ):
        with pytest.raises(SandboxError) as caught:
            do()
        sync.append(caught.value)

    async def repeat() -> list[SandboxError]:
        found: list[SandboxError] = []
        again = await AsyncSandbox.connect(box.id, state_dir=scene.state_dir)
        for call in (
            AsyncSandbox.create(memory_mb=0, state_dir=scene.state_dir, toolkit=toolkit),
            again.files.read("nothing"),
            again.commands.run("exit 3", check=True),
            again.commands.run("sleep 9", timeout_s=0.05, check=True),
            AsyncSandbox.connect(NOT_ONE, state_dir=scene.state_dir),
        ):
            with pytest.raises(SandboxError) as caught:
                await call
            found.append(caught.value)
        return found

    assert [each.record() for each in asyncio.run(repeat())] == [each.record() for each in sync]


def test_errors_of_commands_and_files_name_their_sandbox(scene: Scene):
    box = scene.create(policy=Policy(max_timeout_s=5))
    for do in (
        lambda: box.files.read("nothing"),
        lambda: box.commands.run("exit 3", check=True),
        lambda: box.sessions.create().run("exit 3", check=True),
        lambda: box.commands.run("true", timeout_s=6),
        lambda: box.commands.start("sleep 60").wait(0.01),
    ):
        with pytest.raises(SandboxError) as caught:
            do()
        assert caught.value.sandbox_id == box.id


def test_the_65th_command_at_a_time_is_one_too_many(scene: Scene):
    box = scene.create(pids=400)
    running = [box.commands.start("sleep 60") for _ in range(64)]
    with pytest.raises(QuotaError) as caught:
        box.commands.run("true")
    assert (caught.value.limit, caught.value.blame) == ("commands", "caller")
    running[0].kill()
    assert running[0].wait(30).reason == "killed"
    for _ in range(1000):  # its place is free a moment after its end is told: an error that says to try again
        try:
            assert box.commands.run("true").ok
            break
        except QuotaError:
            continue
    else:
        pytest.fail("the place of one that has ended stays taken")
