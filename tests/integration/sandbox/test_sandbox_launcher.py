"""Who is left of those that have made a `container`, and in which cgroups they are."""

import os
import resource
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox import Sandbox
from sandbox.cgroups import members
from sandbox.errors import CapacityError
from sandbox.journal import Journal
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY
from sandbox.substrates.container import RUNTIMES

PATIENCE_S = 30.0
FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="looks at root's cgroups")


@pytest.fixture(params=RUNTIMES)
def box(request: pytest.FixtureRequest, create) -> Sandbox:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    return create(substrate="container", runtime=request.param)


def init_pid(box: Sandbox, state_dir: Path) -> int:
    """On the host; nothing else is recorded."""
    record = Journal(state_dir).find(box.id)
    assert record is not None
    (init,) = record.processes
    return init.pid


def test_nothing_is_between_the_nursery_and_init(box: Sandbox, state_dir: Path):
    nursery, init = shared_nursery(INIT_BINARY).pid, init_pid(box, state_dir)
    children = Path(f"/proc/{nursery}/task/{nursery}/children")
    give_up_s = time.monotonic() + PATIENCE_S
    while children.read_text().split() != [str(init)]:
        assert time.monotonic() < give_up_s, children.read_text()
        time.sleep(0.01)
    assert box.commands.run("true").ok
    box.kill()
    assert children.read_text() == ""


def test_init_is_in_every_group(box: Sandbox, state_dir: Path):
    init = init_pid(box, state_dir)
    groups = [group for group in box._ownership.groups.paths if group.is_dir()]
    assert groups
    for group in groups:
        assert init in members(group)


def test_the_share_of_a_processor_is_of_the_period_that_every_group_has(create):
    groups = create(substrate="container", cpu=0.5)._ownership.groups.paths
    read = {
        name: [(each / name).read_text().split() for each in groups if (each / name).is_file()]
        for name in FILES
    }
    assert [read["cpu.cfs_quota_us"], read["cpu.cfs_period_us"], read["cpu.max"]] in (
        [[["50000"]], [["100000"]], []],  # of version 1, in which the period is not written
        [[], [], [["50000", "100000"]]],
    )


def test_commands_are_in_every_group(box: Sandbox):
    ready = threading.Event()
    command = box.commands.start("echo; read x", stdin=None, on_stdout=lambda _: ready.set())
    assert ready.wait(PATIENCE_S)
    for group in box._ownership.groups.paths:
        assert any(b"read x" in command_line(pid) for pid in members(group)), group
    command.kill()
    assert command.wait().reason == "killed"


def command_line(pid: int) -> bytes:
    """Empty for one that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_whatever_descriptor_a_launch_lacks_is_a_shortage(create):
    """Of ours, beside what the nursery and what other sandboxes have open."""
    create().kill()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = 0
    for num_free in range(40):
        taken = list[int]()
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for _ in range(num_free):
                os.close(taken.pop())
            create().kill()
            break
        except CapacityError:
            refused += 1
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 3 < refused < 40
