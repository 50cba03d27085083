"""AsyncSandbox is Sandbox, call by call: the same names with the same arguments."""

import inspect
from functools import cached_property

import pytest

from sandbox.aio import AsyncSandbox
from sandbox.aio_commands import AsyncCommands, AsyncRunningCommand, AsyncSession, AsyncSessions
from sandbox.aio_files import AsyncFiles
from sandbox.commands import Commands
from sandbox.files import Files
from sandbox.running import RunningCommand
from sandbox.sandbox import Sandbox
from sandbox.sessions import Session, Sessions

# What is between parts of this package, and not for callers.
INTERNAL = {
    "leave", "timeout_of_run", "end", "check_patience", "runs_on", "on_frame", "on_lost",
    "deadline_ns", "on_deadline", "sandbox_id",
}  # fmt: skip
PAIRS = [
    (Sandbox, AsyncSandbox), (Commands, AsyncCommands), (RunningCommand, AsyncRunningCommand),
    (Sessions, AsyncSessions), (Session, AsyncSession), (Files, AsyncFiles),
]  # fmt: skip
SET_IN_INIT = {"id"}  # handed through as it is
OF_COMMANDS = {"start"}  # of a RunningCommand, which is made of it


@pytest.mark.parametrize(("kind", "other"), PAIRS, ids=lambda kind: kind.__name__)
def test_each_call_is_there_with_its_arguments(kind: type, other: type):
    for name in sorted(set(dir(kind)) - set(dir(object)) - INTERNAL):
        if name.startswith("_") or (other is AsyncRunningCommand and name in SET_IN_INIT | OF_COMMANDS):
            continue
        call = inspect.getattr_static(kind, name)
        if isinstance(call, property | cached_property) or (other is AsyncSandbox and name == "create"):
            assert hasattr(other, name) or name in SET_IN_INIT, name
        else:
            assert arguments(getattr(other, name)) == arguments(getattr(kind, name)), name


@pytest.mark.parametrize("kind", [other for _, other in PAIRS], ids=lambda kind: kind.__name__)
def test_each_call_is_awaited(kind: type):
    calls = [
        (name, getattr(kind, name))
        for name, found in inspect.getmembers_static(kind)
        if not name.startswith("_") and not isinstance(found, property)
    ]
    assert calls
    for name, call in calls:
        arrives = inspect.get_annotations(call).get("return") == "Arrival[AsyncSandbox]"
        assert arrives or inspect.iscoroutinefunction(call), name


def arguments(call: object) -> list[tuple[str, object]]:
    assert callable(call)
    return [(each.name, each.default) for each in inspect.signature(call).parameters.values()]
