"""Machines that have no thread to give, or no memory for its first steps."""

import threading
from collections.abc import Callable
from typing import Literal, NoReturn, get_args

import pytest

Way = Literal["none", "dead", "its own none", "its own dead"]
WAYS: tuple[Way, ...] = get_args(Way)


def no_thread(*arguments: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def dead_at_birth(begin: Callable[[], object], *_: object) -> int:
    """As a thread that finds no memory for its first steps. `threading` would name it as one that is about to
    begin for good, to later tests, too."""
    threading._limbo.pop(getattr(begin, "__self__", None), None)
    return 0


def run_short(patches: pytest.MonkeyPatch, way: Way, up_s: float = 0.05) -> None:
    """From now on: of threads for which nobody waits, or of `threading`'s own. `up_s`: how long a thread that
    does not come up is waited for."""
    begun: Callable[..., int] = dead_at_birth if way.endswith("dead") else no_thread
    module = "threading._start_new_thread" if way.startswith("its own") else "_thread.start_new_thread"
    patches.setattr(module, begun)
    patches.setattr("protocol.threads._UP_S", up_s)
