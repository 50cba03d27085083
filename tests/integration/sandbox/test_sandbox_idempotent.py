"""A create that is repeated with its key makes nothing new."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import AsyncSandbox, Sandbox
from sandbox.audit import check_integrity
from sandbox.errors import Conflict, InvalidArgument, SandboxGone

Create = Callable[..., Sandbox]


def test_the_same_request_is_the_same_sandbox(create: Create, substrate: str, state_dir: Path):
    box = create(substrate=substrate, memory_mb=64, key=f"request-1-{substrate}")
    box.files.write("/workspace/a", "x")
    again = create(substrate=substrate, memory_mb=64, key=f"request-1-{substrate}")
    assert again.id == box.id
    assert again.files.read("/workspace/a") == b"x"
    assert check_integrity(state_dir).live == (box.id,)


def test_another_request_is_a_conflict_that_names_the_field(create: Create, state_dir: Path):
    box = create(memory_mb=64, key="request-2")
    with pytest.raises(Conflict, match="memory_mb=128, which was 64"):
        create(memory_mb=128, key="request-2")
    assert check_integrity(state_dir).live == (box.id,)
    assert box.commands.run("echo on").stdout == "on\n"


def test_requests_at_the_same_time_make_one(create: Create, state_dir: Path):
    boxes: list[Sandbox] = []
    gate = threading.Barrier(6)

    def ask() -> None:
        gate.wait()
        boxes.append(create(key="request-3"))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(boxes) == 6
    assert {each.id for each in boxes} == set(check_integrity(state_dir).live)
    assert len({each.id for each in boxes}) == 1


def test_a_key_of_one_that_has_ended_says_so(create: Create):
    box = create(key="request-4")
    box.kill()
    with pytest.raises(SandboxGone, match="key='request-4'") as caught:
        create(key="request-4")
    assert (caught.value.reason, caught.value.sandbox_id) == ("killed", box.id)
    assert create(key="request-5").id != box.id


def test_a_create_that_failed_can_be_repeated(create: Create):
    with pytest.raises(InvalidArgument, match="snapshot"):
        create(snapshot="absent", key="request-6")
    assert create(key="request-6").is_running


def test_a_cancelled_create_is_found_by_its_key(state_dir: Path, toolkit: Path):
    async def scenario() -> None:
        options = {"state_dir": state_dir, "toolkit": toolkit, "key": "request-7"}
        creating = asyncio.ensure_future(AsyncSandbox.create(**options))
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        async with await AsyncSandbox.create(**options) as box:
            assert check_integrity(state_dir).live == (box.id,)

    asyncio.run(scenario())
    audit = check_integrity(state_dir)
    assert (audit.live, audit.leftovers) == ((), ())
