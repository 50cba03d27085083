"""AsyncSandbox where the machine has no thread left: what ends ends, and what is cancelled leaves nothing."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from thread_shortage import WAYS, Way, run_short

from sandbox import AsyncSandbox, Sandbox
from sandbox.audit import check_integrity
from sandbox.errors import CapacityError

PATIENCE_S = 30


@pytest.mark.parametrize("way", WAYS)
def test_a_sandbox_ends_with_its_block(
    state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, way: Way
):
    async def work() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            run_short(monkeypatch, way)
            with pytest.raises(CapacityError):
                await box.files.read("/etc/passwd")
        assert not box.is_running

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_create_leaves_none(
    state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, way: Way
):
    is_made, may_return, create = asyncio.Event(), threading.Event(), Sandbox.create

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def create_slowly(**options: Any) -> Sandbox:
            made = create(**options)
            loop.call_soon_threadsafe(is_made.set)
            may_return.wait(PATIENCE_S)
            return made

        with monkeypatch.context() as patches:
            patches.setattr(Sandbox, "create", create_slowly)
            creating = asyncio.ensure_future(AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit))
            await is_made.wait()
            run_short(patches, way)
            creating.cancel()
            await asyncio.sleep(0)
            may_return.set()
            with pytest.raises(asyncio.CancelledError):
                await creating

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of_session", [False, True], ids=["command", "session"])
def test_a_run_whose_time_is_over_ends_with_its_processes(
    state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, way: Way, of_session: bool
):
    """Its output is waited for meanwhile, in the loop."""

    async def work() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            runner = await box.sessions.create() if of_session else box.commands
            began = asyncio.Event()
            words = "sleep 1001 & yes | head -n 100000; sleep 1002"
            running = asyncio.ensure_future(runner.run(words, on_stdout=lambda _: began.set()))
            await began.wait()
            run_short(monkeypatch, way)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await running
            assert await box.commands.list() == ()
            found = await box.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            assert "sleep 100" not in found.stdout

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of_session", [False, True], ids=["command", "session"])
def test_a_loop_does_not_stand_still_for_the_thread_of_a_watcher(
    state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, way: Way, of_session: bool
):
    async def work() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            runner = await box.sessions.create() if of_session else box.commands
            run_short(monkeypatch, way, up_s=2.0)
            for call in (runner.run, runner.start):
                calling = asyncio.ensure_future(call("true", on_stdout=lambda _: None))
                longest_s, last_s = 0.0, time.monotonic()
                while not calling.done():
                    await asyncio.sleep(0.01)
                    longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
                assert longest_s < 1
                with pytest.raises(CapacityError, match="ulimit -u"):
                    await calling
            assert await box.commands.list() == ()

    asyncio.run(work())
    assert check_integrity(state_dir).live == ()


@pytest.mark.parametrize("of_run", [False, True], ids=["start", "run"])
def test_a_start_that_is_cancelled_leaves_no_process(
    state_dir: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, of_run: bool
):
    is_started, may_return = asyncio.Event(), threading.Event()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            commands = box.commands._sandbox.commands
            start = commands.start

            def start_slowly(*words: Any, **options: Any) -> Any:
                started = start(*words, **options)
                loop.call_soon_threadsafe(is_started.set)
                may_return.wait(PATIENCE_S)
                return started

            with monkeypatch.context() as patches:
                patches.setattr(commands, "start", start_slowly)
                call = box.commands.run if of_run else box.commands.start
                starting = asyncio.ensure_future(call("sleep 1001", on_stdout=lambda _: None))
                await is_started.wait()
            starting.cancel()
            await asyncio.sleep(0)
            may_return.set()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert await box.commands.list() == ()

    asyncio.run(work())
