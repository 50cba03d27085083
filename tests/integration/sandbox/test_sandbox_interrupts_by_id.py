"""Interrupts of what is done to sandboxes by their ids, to those of other processes, and of sweeps: each is
done or not, never half, and leaves nothing open."""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_internet import wait_until
from sandbox_interrupts import Interrupt, at_each_place, interrupted_twice
from sandbox_owner import Owner, owned

from sandbox import Sandbox, audit, sandboxes
from sandbox.attached import AttachedSandbox
from sandbox.audit_log import entries
from sandbox.errors import InvalidArgument, SandboxError
from sandbox.journal import Journal, Record
from sandbox.processes import ProcessKey, boot_id

GONE = ProcessKey(2**22, 1)  # no pid of this machine's
SWEPT = "sbx-00000000000dead"


@pytest.fixture
def attached(tmp_path: Path, toolkit: Path) -> Iterator[AttachedSandbox]:
    with owned(tmp_path, toolkit) as owner:
        yield sandboxes.attach(owner.id, state_dir=tmp_path)


def descriptors() -> list[str]:
    """What this process has open, but for this look."""
    gc.collect()
    found: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(fd.readlink()))
    return sorted(each for each in found if "/fd" not in each)


def test_one_of_another_process_is_asked_whole(attached: AttachedSandbox):
    def use() -> None:
        attached.files.write("file", "new")
        attached.files.rename("file", "other")
        assert attached.files.read("other") == b"new"
        attached.files.remove("other")
        attached.set_timeout(600)
        attached.pause()
        attached.resume()

    before = descriptors()
    for _ in at_each_place(use):
        assert descriptors() == before
        assert attached.get_info().lifetime_s is not None
        attached.files.write("file", "old")


def test_a_command_in_one_of_another_process_ends(attached: AttachedSandbox):
    before = descriptors()
    for _ in at_each_place(lambda: attached.commands.run("true")):
        wait_until(lambda: descriptors() == before)  # its thread closes the connection

    def interrupt(*_: object) -> None:
        raise Interrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interrupt):
            attached.commands.run("exec sleep 599")
    finally:
        signal.signal(signal.SIGALRM, usual)
    wait_until(lambda: "599" not in attached.commands.run("cat /proc/*/cmdline | tr '\\0' ' '").stdout)
    assert descriptors() == before


def test_a_command_in_one_of_another_process_ends_wherever_a_second_interrupt_comes(
    attached: AttachedSandbox,
):
    number = 1
    while interrupted_twice(0.5, number, lambda: attached.commands.run("exec sleep 599")):
        number += 1
        wait_until(lambda: "599" not in attached.commands.run("cat /proc/*/cmdline | tr '\\0' ' '").stdout)
    assert number > 1


def test_those_of_others_are_listed_found_and_ended(tmp_path: Path, toolkit: Path):
    owners: list[Owner] = []

    def use() -> None:
        (status,) = sandboxes.list(state_dir=tmp_path)
        assert sandboxes.info(status.id, state_dir=tmp_path).id == status.id
        assert sandboxes.set_timeout(status.id, 500, state_dir=tmp_path).lifetime_s is not None
        sandboxes.attach(status.id, state_dir=tmp_path)

    with owned(tmp_path, toolkit) as owner:
        before = descriptors()
        for _ in at_each_place(use):
            assert descriptors() == before
        owners.append(owner)
        sandboxes.kill(owner.id, state_dir=tmp_path)
        assert owner.line() == "killed killed"


def test_own_ones_are_found_and_ended(create: Callable[..., Sandbox], state_dir: Path):
    made: list[Sandbox] = [create()]

    def use() -> None:
        sandboxes.connect(made[-1].id, state_dir=state_dir)
        assert made[-1].id in [each.id for each in sandboxes.list(state_dir=state_dir)]
        sandboxes.kill(made[-1].id, state_dir=state_dir)

    for _ in at_each_place(use):
        if not made[-1].is_running:
            made.append(create())
        assert [each.id for each in Sandbox.list(state_dir=state_dir)] == [made[-1].id]


def test_a_sweep_is_done_or_not(tmp_path: Path):
    def litter() -> None:
        Journal(tmp_path).write(Record(SWEPT, GONE, boot_id(), "function", ()))
        (tmp_path / "images" / f"draft-{GONE.pid}-x" / "etc").mkdir(parents=True, exist_ok=True)

    def ends() -> int:
        return sum((each["sandbox"], each["deed"]) == (SWEPT, "end") for each in entries(tmp_path))

    litter()
    whole = audit.check_integrity(tmp_path)
    assert len(whole.leftovers) == 2
    told = ends()
    for _ in at_each_place(lambda: audit.sweep(tmp_path)):
        left, drafts = audit.check_integrity(tmp_path), list((tmp_path / "images").iterdir())
        if left.is_clean:
            assert (drafts, ends()) == ([], told + 1)
            told += 1
            litter()
        assert (ends(), audit.check_integrity(tmp_path)) == (told, whole)
    assert audit.check_integrity(tmp_path).is_clean


def test_a_look_leaves_nothing_open(tmp_path: Path, create: Callable[..., Sandbox], state_dir: Path):
    box, before = create(), descriptors()
    for _ in at_each_place(lambda: audit.leftovers(state_dir)):
        assert descriptors() == before
    with pytest.raises(SandboxError):
        sandboxes.connect("sbx-0123456789abcde", state_dir=state_dir)
    with pytest.raises(InvalidArgument):
        sandboxes.kill("none", state_dir=state_dir)
    assert box.is_running
