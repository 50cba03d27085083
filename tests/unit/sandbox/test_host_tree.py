"""Trees on the host: no link followed, nothing written outside."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import FileTooLarge, InvalidArgument
from sandbox.host_tree import read_tree, write_tree


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
