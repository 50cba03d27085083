"""Where real sandboxes of tests are made, for the folders that make some; imported by their conftest.py."""

import gc
import os
import resource
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox import sandboxes
from sandbox.guard.node import shared_guard
from sandbox.native.build import build
from sandbox.nursery import shared_nursery
from sandbox.places import INIT_BINARY, default_state_dir, default_toolkit
from sandbox.root_ranges import shared_root_ranges
from sandbox.sealed import sealed_copy
from sandbox.toolkit import build_toolkit


def count_fds() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def assert_no_more_fds(before: int) -> None:
    """Fewer are no fault: what another test left to the garbage collector may have gone meanwhile."""
    if count_fds() > before:
        gc.collect()
        assert count_fds() <= before


@contextmanager
def no_descriptor_left() -> Generator[None]:
    """For this process, as long as the block; what is open stays so."""
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """The one that set-up has made; made now where it is missing or old."""
    build()
    place = default_toolkit(default_state_dir())
    build_toolkit(place)
    shared_guard()  # whose descriptors stay, where this kernel has it
    sandboxes.open_door()  # as does its
    shared_nursery(INIT_BINARY)  # and that one's
    if os.geteuid() == 0:
        shared_root_ranges()  # and the book's
    if (crun := shutil.which("crun")) is not None:
        sealed_copy(crun)  # likewise
    return place


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the image's skeleton is made once."""
    return tmp_path_factory.mktemp("state")
