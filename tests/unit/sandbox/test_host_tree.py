"""Trees on the host: no link followed, nothing written outside."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_places import no_descriptor_left

from sandbox.errors import CapacityError, FileTooLarge, InvalidArgument
from sandbox.host_tree import read_tree, remove_tree, write_tree


def test_files_and_directories_are_read_parents_first(tmp_path: Path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "deep").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "a").chmod(0o750)
    items = [(item.path, item.content) for item in read_tree(tmp_path, max_bytes=100)]
    assert items == [("a", b"1"), ("b", None), ("b/c", None), ("b/c/deep", b"2")]
    assert next(read_tree(tmp_path, max_bytes=100)).mode == 0o750


def test_links_fifos_and_what_they_lead_to_are_left_out(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file-link").symlink_to(outside / "secret")
    (root / "directory-link").symlink_to(outside)
    os.mkfifo(root / "fifo")
    (root / "kept").write_bytes(b"k")
    assert [item.path for item in read_tree(root, max_bytes=100)] == ["kept"]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that anybody can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def read_as_nobody(root: Path) -> list[str]:
    """Paths of a tree, read as somebody whom modes bind."""
    os.seteuid(65534)
    try:
        return [item.path for item in read_tree(root, max_bytes=100)]
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user's are needed")
def test_what_may_not_be_read_is_named_and_a_link_to_it_is_no_matter(open_place: Path):
    (open_place / "link").symlink_to("/root")
    (open_place / "sub").mkdir()
    assert read_as_nobody(open_place) == ["sub"]
    private = open_place / "sub" / "private"
    private.write_bytes(b"p")
    private.chmod(0o600)
    with pytest.raises(InvalidArgument, match="sub/private cannot be read: Permission denied"):
        read_as_nobody(open_place)
    (open_place / "sub").chmod(0o700)
    with pytest.raises(InvalidArgument, match="sub cannot be read: Permission denied"):
        read_as_nobody(open_place)


@pytest.mark.parametrize(("num_read", "words"), [(0, "cannot be read"), (1, "b cannot be read")])
def test_what_no_descriptor_is_left_for_is_an_error_not_a_gap(tmp_path: Path, num_read: int, words: str):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    tree = read_tree(tmp_path, max_bytes=100)
    for _ in range(num_read):
        next(tree)
    with no_descriptor_left(), pytest.raises(CapacityError, match=f"{words}: Too many open files"):
        next(tree)


@pytest.mark.parametrize("swap", [os.mkfifo, lambda place: place.symlink_to("/etc")])
def test_what_becomes_something_else_before_its_turn_is_left_out(
    tmp_path: Path, swap: Callable[[Path], None]
):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    items = read_tree(tmp_path, max_bytes=1000)
    assert next(items).path == "a"
    shutil.rmtree(tmp_path / "b")
    swap(tmp_path / "b")
    assert [each.path for each in items] == ["a/file"]


def test_a_tree_beyond_the_limit_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 60)
    (tmp_path / "b").write_bytes(b"x" * 60)
    with pytest.raises(FileTooLarge, match="b: "):
        list(read_tree(tmp_path, max_bytes=100))


def test_a_file_is_no_tree(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="not a directory"):
        list(read_tree(tmp_path / "a", max_bytes=1))


def test_a_tree_is_written_with_its_parents(tmp_path: Path):
    write_tree(tmp_path / "new", ["empty"], {"a/b/c": b"1", "d": b"2"})
    assert (tmp_path / "new" / "a" / "b" / "c").read_bytes() == b"1"
    assert (tmp_path / "new" / "empty").is_dir()


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../up", "..", "", "a\0b"])
def test_a_name_that_leads_out_writes_nothing_at_all(tmp_path: Path, name: str):
    with pytest.raises(InvalidArgument):
        write_tree(tmp_path / "new", [], {"fine": b"1", name: b"2"})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["d" * 300, "/".join(["d" * 250] * 17), "a/b"], ids=["name", "path", "below a file"]
)
def test_what_the_host_cannot_have_is_said_of_the_directory(tmp_path: Path, name: str):
    with pytest.raises(InvalidArgument, match=r"host_dir=.* cannot be written"):
        write_tree(tmp_path / "new", [], {"a": b"", name: b"1"})


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path):
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(InvalidArgument, match="not empty"):
        write_tree(tmp_path, [], {"link/passwd": b""})


@given(st.text(alphabet="./ab", max_size=8))
def test_no_accepted_name_leaves_the_directory(name: str):
    from sandbox.host_tree import _check_name

    try:
        _check_name(name)
    except InvalidArgument:
        return
    assert os.path.normpath(f"/root/{name}").startswith("/root")


def test_a_tree_goes_however_deep_or_closed_it_is(open_place: Path):
    tree = open_place / "tree"
    tree.mkdir()
    deepest = os.open(tree, os.O_RDONLY)
    for _ in range(2000):  # twice the length of any path
        os.mkdir("level", dir_fd=deepest)
        above, deepest = deepest, os.open("level", os.O_RDONLY, dir_fd=deepest)
        os.close(above)
    os.close(deepest)
    (tree / "closed" / "below").mkdir(parents=True)
    (tree / "closed" / "below" / "file").touch()
    os.mkfifo(tree / "closed" / "fifo")
    (tree / "closed" / "below").chmod(0)
    (tree / "closed").chmod(0)
    if os.geteuid() == 0:  # whom no mode binds
        subprocess.run(["chown", "-R", "65531", str(open_place)], check=True)
        os.seteuid(65531)
    try:
        remove_tree(tree)
    finally:
        os.seteuid(os.getuid())
    assert not tree.exists()


MOUNTED = r"""
mount --bind "$1/outside" "$1/tree/above" && mount --bind "$1/outside" "$1/tree/inner/below" &&
mount --bind "$1/outside" "$1/mounted" && exec "$2" -c '
import sys; from pathlib import Path; from sandbox.host_tree import remove_tree
remove_tree(Path(sys.argv[1], "tree")); remove_tree(Path(sys.argv[1], "mounted"))' "$1"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_no_mount_is_entered_when_a_tree_is_removed(tmp_path: Path):
    for each in ("outside/inner", "tree/above", "tree/inner/below", "tree/gone/below", "mounted"):
        (tmp_path / each).mkdir(parents=True)
    kept = [tmp_path / "outside" / "file", tmp_path / "outside" / "inner" / "file"]
    for each in kept:
        each.touch()
    words = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(tmp_path), sys.executable]
    subprocess.run(words, check=True)
    assert all(each.exists() for each in kept)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("tree/**/*")}
    assert left == {"tree/above", "tree/inner", "tree/inner/below"}


def test_no_link_is_followed_when_a_tree_is_removed(tmp_path: Path):
    outside, tree, link = tmp_path / "outside", tmp_path / "tree", tmp_path / "link"
    for each in (outside / "below", tree / "inner"):
        each.mkdir(parents=True)
    (outside / "below" / "file").touch()
    modes = [each.stat().st_mode for each in (outside, outside / "below")]
    (tree / "inner" / "link").symlink_to(outside)
    link.symlink_to(outside)
    remove_tree(tree)
    remove_tree(link)
    assert [each.name for each in tmp_path.iterdir()] == ["outside"]
    assert [each.stat().st_mode for each in (outside, outside / "below")] == modes
    assert (outside / "below" / "file").exists()
