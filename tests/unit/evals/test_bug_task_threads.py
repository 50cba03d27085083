"""A bug task is read beside the loop: where no thread is to be had for that, nobody waits for one."""

import asyncio
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from evals.team_bugs import open_task
from protocol.errors import InvalidInput, ResourceShortage


def no_sandboxes(*_: object, **__: object) -> NoReturn:
    raise AssertionError("nothing is run")


def open_unknown(cache: Path) -> None:
    asyncio.run(open_task("no such task", cache, no_sandboxes))


def test_without_a_thread_it_is_a_shortage(tmp_path: Path, shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceShortage, match="no thread to read the task"):
        open_unknown(tmp_path)
    shortage.undo()
    with pytest.raises(InvalidInput, match="no such task"):
        open_unknown(tmp_path)
    for thread in threading.enumerate():
        if thread.name.startswith("bug task"):
            thread.join(20.0)
            assert not thread.is_alive()
