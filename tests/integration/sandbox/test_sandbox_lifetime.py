"""How sandboxes end, and that nothing is left when they do, whoever ends them."""

import asyncio
import errno
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from sandbox import AsyncSandbox, Sandbox
from sandbox.audit import check_integrity, leftovers, sweep
from sandbox.audit_log import entries
from sandbox.cgroups import mount_roots
from sandbox.errors import CapacityError, InvalidArgument, SandboxGone, StartError, UnsupportedError
from sandbox.journal import Journal


def wait_until_gone(box: Sandbox) -> SandboxGone:
    box._channel.join()  # which ends with the sandbox
    with pytest.raises(SandboxGone) as caught:
        box.commands.run("true")
    return caught.value


@pytest.mark.parametrize(
    "step", ["life.Freezer", "sandbox.Channel", "sandbox.Sessions", "life.os.pidfd_open"]
)
def test_what_nobody_could_take_over_is_given_back(create, state_dir: Path, monkeypatch, step: str):
    """Whichever of the owner's parts has no descriptor left."""

    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    create()  # what is made once has been
    with monkeypatch.context() as patch:
        patch.setattr(f"sandbox.{step}", is_full)
        with pytest.raises(CapacityError):
            create()
    (_,) = check_integrity(state_dir).live


def test_the_end_of_the_lifetime(create, substrate: str):
    box = create(substrate=substrate, lifetime_s=0.5)
    result = box.commands.run("sleep 1000", timeout_s=100)
    assert result.reason == "killed"
    assert wait_until_gone(box).reason == "expired"
    assert not box.is_running


def test_a_running_command_is_not_idle(create):
    box = create(idle_s=0.3)
    assert box.commands.run("sleep 1").ok


def test_an_idle_sandbox_ends(create, state_dir: Path):
    box = create(idle_s=0.2)
    assert wait_until_gone(box).reason == "idle"
    assert check_integrity(state_dir).live == ()


def test_when_init_dies_the_command_is_lost_and_all_is_freed(create, substrate: str, state_dir: Path):
    box = create(substrate=substrate)
    command = box.commands.start("sleep 1000")
    (record,) = Journal(state_dir).records()
    os.kill(record.processes[-1].pid, signal.SIGKILL)
    result = command.wait()
    assert (result.reason, result.exit_code) == ("lost", None)
    assert wait_until_gone(box).reason == "lost"
    assert check_integrity(state_dir).live == ()


def test_whatever_descriptor_is_the_last_a_create_fails_whole_and_says_why(
    state_dir: Path, toolkit: Path, substrate: str
):
    Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit).kill()
    num_fds = len(list(Path("/proc/self/fd").iterdir())) - 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    outcomes: list[str] = []
    for num_free in range(14):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_fds + num_free, limits[1]))
        try:
            Sandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit).kill()
            outcomes.append("made")
        except (CapacityError, StartError) as error:  # the latter where the runtime inherits too low a limit
            outcomes.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        audit = check_integrity(state_dir)
        assert (audit.live, audit.leftovers) == ((), ())
        assert len(list(Path("/proc/self/fd").iterdir())) - 1 == num_fds
    assert outcomes[-1] == "made"
    assert outcomes[0] != "made"
    assert all("Too many open files" in outcome for outcome in outcomes if outcome != "made")


def test_labels_and_effective_values_are_echoed(create):
    box = create(labels={"run": "7"}, cpu=0.5, memory_mb=100, pids=50, disk_mb=20, lifetime_s=99)
    limits = box.info.limits
    assert dict(box.info.labels) == {"run": "7"}
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (0.5, 100 << 20, 50)
    assert (limits.disk_bytes, limits.lifetime_s, limits.idle_s) == (20 << 20, 99, None)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"substrate": "vm"}, InvalidArgument),
        ({"image": "debian"}, InvalidArgument),
        ({"memory_mb": 0}, InvalidArgument),
        ({"labels": {"a": 1}}, InvalidArgument),
        ({"runtime": "no-such-runtime", "substrate": "container"}, UnsupportedError),
    ],
)
def test_a_refused_create_leaves_nothing(create, options, error):
    with pytest.raises(error):
        create(**options)


def test_a_failed_start_says_why_and_leaves_nothing(create, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho setting up uid map: no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr("sandbox.substrates.function.shutil.which", lambda name: str(broken))
    with pytest.raises(StartError) as caught:
        create()
    assert caught.value.phase == "launch"


def test_runc_works_like_crun(create):
    if os.geteuid() != 0:
        pytest.skip("substrate 'container' needs root")
    if shutil.which("runc") is None:
        pytest.skip("runc is not installed; `make setup` does so where it may")
    box = create(substrate="container", runtime="runc", memory_mb=64, pids=40)
    assert box.commands.run("python3 -V").ok
    assert box.commands.run(["python3", "-c", "x = bytearray(500 << 20)"]).reason == "oom"


def test_cycles_leave_no_thread_and_no_descriptor(create):
    for _ in range(30):
        box = create()
        box.commands.run("true")
        box.kill()
    # `create` compares descriptors and looks for leftovers


def test_sandboxes_come_and_go_in_many_threads(create):
    """The last to go removes the shared parent cgroup, the next to come makes it again."""
    failures: list[BaseException] = []

    def cycle(index: int) -> None:
        try:
            for _ in range(4):
                with create(substrate="function") as box:
                    assert box.commands.run(f"echo {index}").stdout == f"{index}\n"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=cycle, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


OWNER = """
import sys
from sandbox import Sandbox
boxes = [Sandbox.create(substrate=sys.argv[3], state_dir=sys.argv[1], toolkit=sys.argv[2]) for _ in range(2)]
commands = [box.commands.start("(setsid sleep 1001 &) ; echo; sleep 1002") for box in boxes]
print("ready", flush=True)
commands[0].wait()
"""


@pytest.fixture
def owner(tmp_path: Path, toolkit: Path, substrate: str):
    """Another process that owns two sandboxes with a running command each."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path), str(toolkit), substrate],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    sweep(tmp_path)


def test_sandboxes_of_a_live_owner_are_left_alone(owner, tmp_path: Path):
    assert len(check_integrity(tmp_path).live) == 2
    assert sweep(tmp_path) == ()
    assert len(check_integrity(tmp_path).live) == 2


def test_after_kill_9_of_the_owner_a_sweep_leaves_nothing(owner, tmp_path: Path):
    records = Journal(tmp_path).records()
    owner.kill()
    owner.wait()

    removed = sweep(tmp_path)

    ends = {each["sandbox"]: each["reason"] for each in entries(tmp_path) if each["deed"] == "end"}
    assert ends == {each.id: "swept" for each in records}
    assert {each.sandbox_id for each in removed if each.kind == "record"} == {each.id for each in records}
    assert sweep(tmp_path) == ()  # the second time it is silent
    assert leftovers(tmp_path) == ()
    for record in records:
        assert not any(process.is_alive() for process in record.processes)
        assert not any(Path(path).exists() for path in record.cgroups)
    assert Journal(tmp_path).records() == []


def test_sandboxes_die_with_a_killed_owner_without_any_sweep(owner, tmp_path: Path):
    records = Journal(tmp_path).records()
    handles = [os.pidfd_open(process.pid) for record in records for process in record.processes]
    owner.kill()
    owner.wait()
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(30_000), "a process has outlived its owner"
        os.close(handle)


def test_a_sweep_of_nothing_is_silent(tmp_path: Path):
    assert sweep(tmp_path) == ()
    assert sweep(tmp_path / "absent") == ()


def test_drafts_of_dead_makers_are_swept(tmp_path: Path):
    (tmp_path / "images" / "draft-4194999-x" / "etc").mkdir(parents=True)
    (tmp_path / "sandboxes").mkdir()
    (tmp_path / "sandboxes" / "sbx-1.json").write_text("{")
    assert {each.kind for each in sweep(tmp_path)} == {"directory", "record"}
    assert sweep(tmp_path) == ()


def test_asyncio(state_dir: Path, toolkit: Path, substrate: str):
    async def work() -> None:
        async with await AsyncSandbox.create(
            substrate=substrate, state_dir=state_dir, toolkit=toolkit
        ) as box:
            results = await asyncio.gather(*(box.commands.run(f"echo {index}") for index in range(10)))
            assert [result.stdout for result in results] == [f"{index}\n" for index in range(10)]
            await box.files.write("a", b"1")
            await box.files.rename("a", "below/b")
            assert await box.files.read("below/b") == b"1"
        assert not box.is_running

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


def test_a_cancelled_run_leaves_no_process(state_dir: Path, toolkit: Path):
    async def work() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.commands.run("(setsid sleep 1001 &) ; sleep 1002"), 0.3)
            assert "sleep" not in (await box.commands.run(["ps", "-eo", "comm="])).stdout

    asyncio.run(work())


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.02, 0.05])
def test_a_cancelled_create_leaves_no_sandbox(state_dir: Path, toolkit: Path, delay_s: float):
    async def create_and_wait() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit):
            await asyncio.sleep(1000)

    async def work() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(create_and_wait(), delay_s)

    asyncio.run(work())
    audit = check_integrity(state_dir)
    assert (audit.live, audit.leftovers) == ((), ())


def test_what_lives_is_not_abandoned_however_old_its_groups_are(create, substrate: str, state_dir: Path):
    box = create(substrate=substrate)
    groups = [path for root in mount_roots() for path in root.glob(f"dockyard/*/{box.id}")]
    assert groups or os.geteuid() != 0
    for path in groups:  # not all groups of the machine: others may be making some
        os.utime(path, (1.0, 1.0))
    sweep(state_dir)
    assert all(path.exists() for path in groups)
    assert box.commands.run("true").ok
