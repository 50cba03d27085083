"""A copy of a layer is the layer: all that an overlay keeps in it, moved to other ids."""

import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.native.build import build
from sandbox.places import INIT_BINARY

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="ids, whiteouts and their attributes are root's")
FROM, TO, LIMIT = 600_000, 700_000, 1 << 30
OPAQUE = "trusted.overlay.opaque"


@pytest.fixture(scope="module", autouse=True)
def _built():
    build()


def copy(source: Path, target: Path, limit: int = LIMIT) -> "subprocess.CompletedProcess[str]":
    target.mkdir(exist_ok=True)
    ids = (FROM, TO) if IS_ROOT else (0, 0)
    words = [str(INIT_BINARY), "copy", str(source), str(target), *map(str, ids), str(limit), str(os.getpid())]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def moved(number: int) -> int:
    return number - FROM + TO if FROM <= number < FROM + 65536 else number


def look(root: Path, *, move: bool) -> dict[str, object]:
    """Everything about every entry, ids as they are to be."""
    found: dict[str, object] = {}
    names: dict[int, str] = {}
    for path in sorted(entries(root)):
        info = path.lstat()
        name = path.relative_to(root).as_posix()
        kind = stat.S_IFMT(info.st_mode)
        ids = (moved(info.st_uid), moved(info.st_gid)) if move else (info.st_uid, info.st_gid)
        first = names.setdefault(info.st_ino, name) if kind != stat.S_IFDIR else name
        text = path.readlink() if path.is_symlink() else path.read_bytes() if kind == stat.S_IFREG else ""
        attributes = {key: os.getxattr(path, key, follow_symlinks=False) for key in xattrs(path)}
        found[name] = (
            info.st_mode, ids, info.st_mtime_ns, info.st_rdev, first, text, attributes,
            info.st_nlink if kind != stat.S_IFDIR else 0,
        )  # fmt: skip
    return found


def entries(root: Path) -> Iterator[Path]:
    yield root
    for directory, names, files in os.walk(root):
        yield from (Path(directory, name) for name in (*names, *files))


def xattrs(path: Path) -> list[str]:
    return [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("security.")]


NAMES = st.text("abé \n\\", min_size=1, max_size=3)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o4755, 0o444])
LEAVES = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=64), MODES, st.integers(0, 3)),
    st.tuples(st.just("hole"), st.integers(1, 1 << 20), MODES, st.integers(0, 3)),
    st.tuples(st.just("link"), st.text("ab/.", min_size=1, max_size=6)),
    st.tuples(st.just("again"), st.integers(0, 9)),
    st.tuples(st.just("fifo")),
    st.tuples(st.just("socket")),
    st.tuples(st.just("whiteout")),
)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, inner), max_size=4),
    max_leaves=20,
)


def plant(root: Path, tree: dict[str, object], files: list[Path]) -> None:
    for name, what in tree.items():
        path = root / name
        if isinstance(what, dict):
            path.mkdir()
            plant(path, what, files)
            if IS_ROOT and len(what) == 3:
                os.setxattr(path, OPAQUE, b"y")
            path.chmod(0o1777 if len(what) == 2 else 0o750)
        else:
            plant_leaf(path, what, files)
        if not path.is_symlink() and path.exists() and not path.is_dir():
            os.utime(path, ns=(1, 10**18 + len(files)))
    os.utime(root, ns=(1, 10**18 + 7))


def plant_leaf(path: Path, what: tuple, files: list[Path]) -> None:
    match what:
        case ("file" | "hole" as kind, value, mode, owner):
            if kind == "file":
                path.write_bytes(value)
            else:
                path.touch()
                os.truncate(path, value)
            if IS_ROOT:
                os.chown(path, FROM + owner, FROM + 65535)
                os.setxattr(path, "user.note", bytes(owner))
            path.chmod(mode)
            files.append(path)
        case ("link", target):
            path.symlink_to(target)
        case ("again", number) if files:
            path.hardlink_to(files[number % len(files)])
        case ("fifo",):
            os.mkfifo(path, 0o620)
        case ("socket",):
            os.mknod(path, stat.S_IFSOCK | 0o660)
        case ("whiteout",):
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        case _:
            path.mkdir()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES)
def test_a_copy_of_any_tree_is_that_tree(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]):
    place = tmp_path_factory.mktemp("tree")
    (place / "from").mkdir()
    plant(place / "from", tree, [])
    before = look(place / "from", move=True)
    done = copy(place / "from", place / "to")
    assert done.stderr == ""
    assert look(place / "to", move=False) == before
    assert int(done.stdout.split()[1]) == len(before) - 1


@needs_root
def test_an_overlay_of_the_copy_shows_what_one_of_the_layer_shows(tmp_path: Path):
    """Deleted, replaced and moved directories, mounted by the kernel that made them."""
    script = f"""
set -e
cd {tmp_path}; mkdir lower a b work-a work-b root-a root-b
mkdir -p lower/gone lower/replaced/old lower/kept
touch lower/gone/x lower/replaced/old/x lower/file lower/kept/y
mount -t overlay -o lowerdir=lower,upperdir=a,workdir=work-a o root-a
rm -r root-a/gone root-a/replaced root-a/file; mkdir root-a/replaced; touch root-a/replaced/new root-a/kept/z
{INIT_BINARY} copy a b {FROM} {TO} {LIMIT} $$ >/dev/null
mount -t overlay -o lowerdir=lower,upperdir=b,workdir=work-b o root-b
(cd root-a; find . | sort) > seen-a; (cd root-b; find . | sort) > seen-b
cmp seen-a seen-b; cat seen-b
"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split() == [".", "./kept", "./kept/y", "./kept/z", "./replaced", "./replaced/new"]


@needs_root
def test_access_lists_name_the_new_ids(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    (source / "file").touch()
    listed = b"".join(
        (tag.to_bytes(2, "little") + (6).to_bytes(2, "little") + number.to_bytes(4, "little"))
        for tag, number in ((1, 2**32 - 1), (2, FROM + 5), (4, 2**32 - 1), (16, 2**32 - 1), (32, 2**32 - 1))
    )
    os.setxattr(source / "file", "system.posix_acl_access", (2).to_bytes(4, "little") + listed)
    assert copy(source, tmp_path / "to").stderr == ""
    value = os.getxattr(tmp_path / "to/file", "system.posix_acl_access")
    assert int.from_bytes(value[16:20], "little") == TO + 5


def test_holes_stay_holes(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    with (source / "file").open("wb") as file:
        for place in (0, 8 << 20, 40 << 20):
            file.seek(place)
            file.write(b"data")
        file.truncate(64 << 20)
    done = copy(source, tmp_path / "to", limit=1 << 20)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to/file").read_bytes() == (source / "file").read_bytes()
    assert (tmp_path / "to/file").stat().st_blocks * 512 < 1 << 20


def test_more_bytes_than_allowed_end_it(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    (source / "file").write_bytes(bytes(range(256)) * 64)
    done = copy(source, tmp_path / "to", limit=10_000)
    assert (done.returncode, done.stderr) == (3, "dockyard-init: more than 10000 bytes\n")


@needs_root
def test_a_device_is_refused(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    os.mknod(source / "null", stat.S_IFCHR, os.makedev(1, 3))
    done = copy(source, tmp_path / "to")
    assert done.returncode == 125
    assert "null is a device" in done.stderr


def test_a_tree_that_is_too_deep_is_refused(tmp_path: Path):
    source = tmp_path / "from"
    (source / Path(*"d" * 300)).mkdir(parents=True)
    done = copy(source, tmp_path / "to")
    assert done.returncode == 6
    assert "nested deeper than 200" in done.stderr


def test_a_link_is_copied_and_not_followed(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    (tmp_path / "secret").write_text("secret")
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "directory").symlink_to(tmp_path)
    assert copy(source, tmp_path / "to").returncode == 0
    assert (tmp_path / "to/link").readlink() == tmp_path / "secret"
    assert (tmp_path / "to/directory").is_symlink()


def test_a_socket_with_a_listener_is_copied_without_one(tmp_path: Path):
    source = tmp_path / "from"
    source.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
        server.listen()
        assert copy(source, tmp_path / "to").returncode == 0
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(tmp_path / "to/socket"))


def test_more_names_than_go_with_the_bytes_end_it(tmp_path: Path):
    source = tmp_path / "source"
    for directory in ("a", "b"):
        (source / directory).mkdir(parents=True)
        (source / directory / "file").touch()
        for number in range(33_000):
            os.link(source / directory / "file", source / directory / f"{number}")
    done = copy(source, tmp_path / "target", limit=1 << 20)
    assert (done.returncode, done.stderr) == (0, "")
    done = copy(source, tmp_path / "other", limit=4096)
    assert (done.returncode, done.stderr) == (3, "dockyard-init: more than 65540 entries\n")


WHOEVER_ASKED = """
import os, subprocess, sys
with subprocess.Popen([*sys.argv[1:], str(os.getpid())]) as copier:
    print(copier.pid, flush=True)
"""


def test_a_copy_ends_with_whoever_asked_for_it(tmp_path: Path):
    source, target, number = tmp_path / "source", tmp_path / "target", 20_000
    source.mkdir(), target.mkdir()
    for each in range(number):
        (source / f"{each}").touch()
    words = [str(INIT_BINARY), "copy", str(source), str(target), "0", "0", str(LIMIT)]
    with subprocess.Popen([sys.executable, "-c", WHOEVER_ASKED, *words], stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        copier = os.pidfd_open(int(asking.stdout.readline()))
        asking.kill()
    assert select.select([copier], [], [], 30)[0]
    os.close(copier)
    assert len(list(target.iterdir())) < number
