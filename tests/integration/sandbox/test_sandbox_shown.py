"""What a sandbox and its like look like when they are printed: their ids, and no value of their order."""

from pathlib import Path

from sandbox import Sandbox, sandboxes

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
