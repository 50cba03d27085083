"""No step waits for a disk: whatever touches it runs in the disk's thread."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_runs import drain, finish, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.cache.disk_tier import DiskTier
from engine.cache.folder_index import FolderIndex

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = tuple(random.Random(4).choices(range(3, len(TOKENS)), k=100))

Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_model: Path, cpu_library: Path, tmp_path: Path) -> Iterator[Make]:
    """Engines over one folder, closed at the end."""
    made: list[Engine] = []

    def engine(**tiers: object) -> Engine:
        more = {"host_bytes": 8 << 20, "disk_path": str(tmp_path), **tiers}
        made.append(small_engine(tiny_model, operations="c", tiers=more))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def test_what_touches_the_disk_is_never_the_engines_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    expected = finish(first, [Request("r", PROMPT, NEW)])
    first.close()
    names: set[str] = set()

    def watched(owner: type, name: str) -> None:
        right: Any = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            names.add(threading.current_thread().name)
            return right(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    second = make()
    for owner, name in (
        (DiskTier, "get"), (DiskTier, "put"), (FolderIndex, "catch_up"), (FolderIndex, "path"),
        (FolderIndex, "read_folder"), (Path, "stat"), (Path, "exists"), (Path, "read_bytes"),
    ):  # fmt: skip
        watched(owner, name)
    assert finish(second, [Request("r", PROMPT, NEW)]) == expected
    second._residence.tiers.flush()
    counts = second.statistics()
    assert counts.tiers.disk is not None
    assert counts.tiers.disk.hits >= 5
    assert names == {"kv-disk"}


def test_a_request_that_comes_before_the_folder_is_read_waits_for_that_and_finds_its_prefix(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    expected = finish(first, [Request("r", PROMPT, NEW)])
    first.close()
    go_on, read = threading.Event(), FolderIndex.read_folder

    def slow(index: FolderIndex, now_s: float) -> None:
        go_on.wait(60)
        read(index, now_s)

    monkeypatch.setattr(FolderIndex, "read_folder", slow)
    second = make(load_timeout_s=600.0)
    second.add(Request("r", PROMPT, NEW))
    second.add(Request("gone", PROMPT, NEW))
    assert second.step().num_rows == 0
    second.check_integrity()
    assert second.statistics().loading == 2
    assert second.abort("gone")
    go_on.set()
    outputs, _ = drain(second)
    assert outputs == expected
    assert second.statistics().scheduler.loaded_blocks >= 5


def test_a_folder_that_is_not_read_in_time_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    expected = finish(first, [Request("r", PROMPT, NEW)])
    go_on, read = threading.Event(), FolderIndex.read_folder

    def slow(index: FolderIndex, now_s: float) -> None:
        go_on.wait(60)
        read(index, now_s)

    monkeypatch.setattr(FolderIndex, "read_folder", slow)
    second = make(load_timeout_s=0.01)
    try:
        assert finish(second, [Request("r", PROMPT, NEW)]) == expected
        assert second.statistics().scheduler.loaded_blocks == 0
    finally:
        go_on.set()


def test_what_a_running_worker_writes_is_found_by_another_that_runs_too(make: Make) -> None:
    first, second = make(), make()
    expected = finish(first, [Request("r", PROMPT, NEW)])
    first._residence.tiers.flush()
    assert finish(second, [Request("miss", PROMPT[:20], NEW)])  # it asks for what is not known
    second._residence.tiers.flush()
    assert finish(second, [Request("r", PROMPT, NEW)]) == expected
    assert second.statistics().scheduler.loaded_blocks >= 5
