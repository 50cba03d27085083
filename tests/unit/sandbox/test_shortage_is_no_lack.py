"""What cannot be tried for want of a descriptor is not what this host lacks: it is said, and tried again."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from sandbox_places import no_descriptor_left

from sandbox.egress.libbpf import load_library
from sandbox.egress.service import first_nameserver
from sandbox.errors import CapacityError, UnsupportedError
from sandbox.guard import node
from sandbox.layers import image, quota
from sandbox.layers.base import LayerWish
from sandbox.layers.choice import choose
from sandbox.layers.image import ImageLayers
from sandbox.places import EGRESS_OBJECT
from sandbox.policy import apparmor_profiles
from sandbox.sealed import sealed_copy

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
WISHES: tuple[LayerWish, ...] = ("disk", "disk-first", "image")
LOAD = """
import os, resource, sys
from pathlib import Path
from sandbox.egress.libbpf import BpfObject, load_library
load_library()
most = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.open("/", os.O_PATH)
os.close(free)
for number in (1, 5, 9, 13, 17, 25):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + number, most[1]))
    try:
        BpfObject(Path(sys.argv[1])).close()
    except OSError as error:
        print(error.errno, end=" ")
resource.setrlimit(resource.RLIMIT_NOFILE, most)
BpfObject(Path(sys.argv[1])).close()
print("loaded")
"""


class Disk(NamedTuple):
    f_bavail: int
    f_frsize: int


@needs_root
def test_programs_are_loaded_after_a_want_of_descriptors() -> None:
    """libbpf would remember that the kernel has not what it could not try."""
    try:
        load_library()
    except OSError:
        pytest.skip("no libbpf here")
    words = [sys.executable, "-c", LOAD, str(EGRESS_OBJECT)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EMFILE} " * 6 + "loaded\n"


def test_a_guard_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes would be without it for as long as their owner lives."""
    wants = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    class Guard:
        def __init__(self) -> None:
            if wants:
                raise wants.pop()

    monkeypatch.setattr(node, "Guard", Guard)
    node._attempt.cache_clear()
    try:
        with pytest.raises(CapacityError, match="loading the guard's programs: Too many open files"):
            node.shared_guard()
        assert isinstance(node.shared_guard(), Guard)
    finally:
        node._attempt.cache_clear()


@needs_root
def test_a_layer_on_disk_is_tried_again(tmp_path: Path) -> None:
    try:
        choose("disk", tmp_path / "before")
    except UnsupportedError as error:
        pytest.skip(error.message)
    with no_descriptor_left():
        for wish in WISHES:
            with pytest.raises(CapacityError, match="Too many open files"):
                choose(wish, tmp_path)
    assert choose("disk", tmp_path) != "memory"


@needs_root
def test_a_full_disk_is_no_disk_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ImageLayers()

    def full(place: Path) -> Disk:
        return Disk(0, 4096)

    with monkeypatch.context() as patched:
        patched.setattr(image.os, "statvfs", full)
        for missing in (layers.missing, quota.QuotaLayers().missing):
            with pytest.raises(CapacityError, match="has 0 MiB free"):
                missing(tmp_path)
    assert "free" not in layers.missing(tmp_path)


def test_a_program_is_copied_the_next_time() -> None:
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        sealed_copy("/usr/bin/env")
    assert sealed_copy("/usr/bin/env") is not None


def test_a_nameserver_that_cannot_be_read_is_not_none(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 192.0.2.53\n")
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        first_nameserver(file)
    assert first_nameserver(file) == ("192.0.2.53", 53)
    assert first_nameserver(tmp_path / "none") is None


def test_a_profile_that_may_be_loaded_is_not_taken_for_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay in the kernel, and nobody would know of it."""
    monkeypatch.setattr(apparmor_profiles, "_LOADED", tmp_path / "profiles")
    assert not apparmor_profiles._is_loaded("one")
    (tmp_path / "profiles").write_text("one (enforce)\n")
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        apparmor_profiles._is_loaded("one")
    assert apparmor_profiles._is_loaded("one")
