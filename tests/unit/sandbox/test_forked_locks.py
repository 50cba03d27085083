"""A child of a fork waits for no lock that another thread of its parent's had: all that the package's modules
have are found and held, and none is in the child."""

import importlib
import os
import pkgutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import sandbox
from sandbox.forks import kept_from_children
from sandbox.layers.base import Layer
from sandbox.layers.choice import _images
from sandbox.pool import Pool
from sandbox.root_ranges import shared_root_ranges

LOCK = type(threading.Lock())


def locks() -> Iterator[tuple[str, Any]]:
    """Those of modules, and of objects that modules have."""
    names = [each.name for each in pkgutil.walk_packages(sandbox.__path__, "sandbox.")]
    for module in (each for each in names if not each.endswith(".__main__")):
        for name, value in vars(importlib.import_module(module)).items():
            yield from _of(f"{module}.{name}", value)


def _of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, LOCK):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _of_object(f"{name}[{key}]", each)
    else:
        yield from _of_object(name, value)


def _of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value).__module__.startswith("sandbox."):
        for field, each in getattr(value, "__dict__", {}).items():
            if isinstance(each, LOCK):
                yield f"{name}.{field}", each


def in_child(told: Callable[[], object]) -> str:
    """What `told()` returns in a child of a fork."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, str(told()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_no_lock_of_another_thread_is_held_in_a_child():
    if os.geteuid() == 0:
        shared_root_ranges()  # as of a process that has made a sandbox
    found = dict(locks())
    assert {"sandbox.sealed._lock", "sandbox.guard.node._lock", "sandbox.shortfalls._lock"} <= set(found)
    are_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in {id(each): each for each in found.values()}.values():
            lock.acquire()
        are_held.set()
        may_end.wait()
        for lock in {id(each): each for each in found.values()}.values():
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    are_held.wait()
    try:
        assert in_child(lambda: [name for name, lock in locks() if lock.locked()]) == "[]"
    finally:
        may_end.set()
        holder.join()


def test_what_a_pool_has_ready_is_not_handed_out_twice():
    pool = Pool(lambda: "made here", lambda _: None, 1)
    pool._stock = deque(["made ahead"])
    pool._size = 0

    def claim() -> str:
        pool.leave()
        return pool.claim()

    assert in_child(claim) == "made here"
    assert pool.claim() == "made ahead"


def test_layers_that_are_ready_stay_the_parents(tmp_path: Path):
    mount = os.open(tmp_path, os.O_RDONLY)
    pool = Pool(Layer, Layer.let_go, 1)
    pool._stock = deque([Layer(mount)])
    key: Any = (tmp_path, None)
    _images._pools[key] = pool
    try:
        place = Path(f"/proc/self/fd/{mount}")
        assert in_child(lambda: (len(_images._pools), place.exists())) == "(0, False)"
        assert place.exists()
    finally:
        _images._pools.pop(key).close()


def test_a_descriptor_of_a_block_is_closed_in_a_child_and_behind_it():
    mine = os.memfd_create("block")
    with kept_from_children(mine):
        assert os.fstat(mine).st_size == 0
        if (child := os.fork()) == 0:
            try:
                os.fstat(mine)
            except OSError:
                os._exit(7)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mine)
