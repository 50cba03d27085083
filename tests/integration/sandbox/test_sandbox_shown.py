"""What a sandbox and its like look like when they are printed: their ids, and no value of their order."""

import asyncio
from pathlib import Path

from sandbox import AsyncSandbox, Sandbox, sandboxes

SECRET = "s3cret"


def test_ids_are_shown_and_nothing_else(create, state_dir: Path):
    box: Sandbox = create(env={"TOKEN": SECRET})
    command = box.commands.start(f"sleep 60; echo {SECRET}", env={"KEY": SECRET})
    session = box.sessions.create(env={"KEY": SECRET})
    assert repr(box) == f"<Sandbox {box.id}>"
    assert repr(command) == f"<RunningCommand {command.id}>"
    assert repr(session) == f"<Session {session.id}>"
    assert repr(sandboxes.attach(box.id, state_dir=state_dir)) == f"<AttachedSandbox {box.id}>"
    command.kill()


def test_asynchronous_ones_are_shown_alike(state_dir: Path, toolkit: Path):
    async def main() -> None:
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            assert repr(box) == f"<AsyncSandbox {box.id}>"
            command = await box.commands.start("true")
            assert repr(command) == f"<AsyncRunningCommand {command.id}>"
            assert repr(await box.sessions.create()).startswith("<AsyncSession ses-")
            await command.wait()

    asyncio.run(main())
