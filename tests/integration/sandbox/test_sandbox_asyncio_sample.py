"""AsyncSandbox as its page says it is used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox import AsyncSandbox, Sandbox
from sandbox.aio_arrival import Arrival
from sandbox.audit import check_integrity
from sandbox.errors import InvalidArgument

PAGE = Path(__file__).parents[3] / "docs/sandbox.md"


@pytest.fixture
def here(state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes of this test's are made in its own folders, whatever makes them."""
    create: Callable[..., Sandbox] = Sandbox.create

    def create_here(*words: Any, **options: Any) -> Sandbox:
        return create(*words, **{"state_dir": state_dir, "toolkit": toolkit, **options})

    monkeypatch.setattr(Sandbox, "create", staticmethod(create_here))


def test_the_pages_sample_prints_what_it_says(
    here: None, state_dir: Path, capsys: pytest.CaptureFixture[str]
):
    (sample,) = [
        block.split("```")[0]
        for block in PAGE.read_text().split("```python\n")[1:]
        if "AsyncSandbox" in block.split("```")[0]
    ]
    exec(compile(sample, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "['1\\n', '2\\n', '3\\n']\nhello\n ()\n"
    assert check_integrity(state_dir).live == ()


def test_what_is_on_its_way_is_awaited_entered_or_made_a_task_of(here: None, state_dir: Path):
    async def work() -> None:
        async with AsyncSandbox.create() as entered:
            assert entered.is_running
            again = await AsyncSandbox.connect(entered.id, state_dir=state_dir)
            assert again.id == entered.id
            (running,) = await box_with_command(entered)
            await (await entered.commands.connect(running)).kill()
        assert not entered.is_running
        async with asyncio.TaskGroup() as group:
            task = group.create_task(AsyncSandbox.create())
        async with task.result() as box:
            assert (await box.commands.run("echo on")).stdout == "on\n"
        with pytest.raises(InvalidArgument):
            async with AsyncSandbox.create(memory_mb=0):
                raise AssertionError("unreachable")
        creating = AsyncSandbox.create()
        assert isinstance(creating, Arrival)
        creating.close()  # of which nothing has begun

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


async def box_with_command(box: AsyncSandbox) -> list[int]:
    await box.commands.start("sleep 60")
    return [each.id for each in await box.commands.list()]


def test_a_body_that_fails_ends_its_sandbox(here: None, state_dir: Path):
    async def work() -> None:
        async with AsyncSandbox.create():
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(work())
    assert check_integrity(state_dir).live == ()
