"""Files: done inside, so nothing on the host is ever in reach."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sandbox_places import no_descriptor_left

from sandbox import Sandbox
from sandbox.errors import (
    CapacityError,
    FileError,
    FileMissing,
    FileTooLarge,
    InvalidArgument,
    NoSpace,
    UnsafePath,
)
from sandbox.wire import Kind


def test_what_is_written_is_read_back(box: Sandbox):
    data = os.urandom(2_500_000)
    box.files.write("deep/down/file", data)
    assert box.files.read("/workspace/deep/down/file") == data
    assert box.commands.run("sha256sum < deep/down/file").ok


def test_text_is_utf8_and_empty_files_exist(box: Sandbox):
    box.files.write("/tmp/a", "grüße")
    box.files.write("/tmp/b", b"")
    assert box.files.read("/tmp/a") == "grüße".encode()
    assert box.files.read("/tmp/b") == b""


def test_writing_replaces(box: Sandbox):
    box.files.write("a", b"long content")
    box.files.write("a", b"short", mode=0o755)
    assert box.files.read("a") == b"short"
    assert box.files.stat("a").mode == 0o755


def test_list_stat_exists_make_remove(box: Sandbox):
    box.files.make_dir("d/e")
    box.files.make_dir("d/e")
    box.files.write("d/f", b"123")
    box.commands.run("ln -s f d/link")
    listed = [(entry.name, entry.type, entry.target) for entry in box.files.list("d")]
    assert listed == [("e", "dir", ""), ("f", "file", ""), ("link", "link", "f")]
    assert (box.files.stat("d/f").size, box.files.stat("d/f").name) == (3, "f")
    assert box.files.exists("d/link")
    box.files.remove("d")
    assert not box.files.exists("d")
    with pytest.raises(FileMissing, match="d: No such file"):
        box.files.remove("d")


def test_rename_moves_and_replaces_in_one_step(box: Sandbox):
    box.files.write("a", b"new", mode=0o755)
    box.files.write("b", b"old")
    box.files.rename("a", "b")
    assert (box.files.read("b"), box.files.stat("b").mode) == (b"new", 0o755)
    assert not box.files.exists("a")
    box.files.rename("b", "/tmp/far/below/b c")
    assert box.files.read("/tmp/far/below/b c") == b"new"
    box.files.rename("/tmp/far", "tree")
    assert box.files.read("tree/below/b c") == b"new"
    box.files.rename("tree/below/b c", "tree/below/b c")
    box.files.rename("tree/below/b c", "x" * 255)
    assert box.files.read("x" * 255) == b"new"


def test_rename_of_links_moves_the_links(box: Sandbox):
    box.files.write("target", b"kept")
    box.commands.run("ln -s target link; ln -s nowhere dangling")
    box.files.rename("link", "dangling")
    assert box.files.stat("dangling").target == "target"
    box.files.write("other", b"1")
    box.files.rename("other", "dangling")
    assert (box.files.read("dangling"), box.files.read("target")) == (b"1", b"kept")


def test_what_cannot_be_renamed_says_why(box: Sandbox):
    box.files.write("d/e/f", b"")
    box.files.write("g/h", b"")
    with pytest.raises(FileMissing, match="/workspace/absent -> /workspace/new: No such file"):
        box.files.rename("absent", "new")
    for path, to, number in (
        ("d", "d/e/x", errno.EINVAL),
        ("d", "g", errno.ENOTEMPTY),
        ("g/h", "d", errno.EISDIR),
        ("g/h", "/dev/shm/h", errno.EXDEV),
        ("g/h", "/usr/h", None),
    ):
        with pytest.raises(FileError) as refused:
            box.files.rename(path, to)
        assert number is None or refused.value.errno == number
    with pytest.raises(FileMissing):
        box.files.rename("g/h", "g/h/i")
    assert box.files.read("g/h") == b""
    for bad in ("", "a\0b", "x" * 5000):
        with pytest.raises(InvalidArgument):
            box.files.rename("g/h", bad)


def test_paths_of_the_greatest_length_are_renamed(box: Sandbox):
    deep = "/".join(["y" * 250] * 15)
    long, longer = f"/workspace/{deep}/{'a' * 250}", f"/workspace/{deep}/{'b' * 250}"
    assert len(long) > 4000
    box.files.write(long, b"1")
    box.files.rename(long, longer)
    assert box.files.read(longer) == b"1"


def test_missing_files_are_file_not_found_errors(box: Sandbox):
    with pytest.raises(FileNotFoundError, match="/absent: No such file"):
        box.files.read("/absent")
    with pytest.raises(FileMissing):
        box.files.list("/absent")


def test_a_directory_is_no_file(box: Sandbox):
    with pytest.raises(FileError, match="Is a directory"):
        box.files.read("/tmp")
    with pytest.raises(FileError, match="Is a directory"):
        box.files.write("/tmp", b"")


def test_fifos_sockets_and_devices_never_block(box: Sandbox):
    box.commands.run("mkfifo /tmp/fifo")
    reader = box.commands.start("exec 3<>/tmp/fifo; sleep 1000")
    for path in ["/tmp/fifo", "/dev/zero", "/dev/null", "/dev/tty"]:
        with pytest.raises(FileError):
            box.files.read(path)
        with pytest.raises(FileError):
            box.files.write(path, b"x")
    with pytest.raises(UnsafePath):
        box.files.read("/dev/zero")
    reader.kill()


def test_a_file_larger_than_allowed_is_not_read_in_part(box: Sandbox):
    box.files.write("big", b"x" * 1001)
    assert len(box.files.read("big", max_bytes=1001)) == 1001
    with pytest.raises(FileTooLarge):
        box.files.read("big", max_bytes=1000)


def test_an_endless_file_is_cut_off(box: Sandbox):
    box.commands.run("truncate -s 200M /tmp/sparse")
    with pytest.raises(FileTooLarge):
        box.files.read("/tmp/sparse", max_bytes=1_000_000)


def test_a_full_layer_is_no_space(create, substrate: str):
    box = create(substrate=substrate, disk_mb=2)
    with pytest.raises(NoSpace):
        box.files.write("big", b"x" * (4 << 20))


def test_read_only_places_refuse(box: Sandbox):
    with pytest.raises(FileError, match="Read-only file system"):
        box.files.write("/usr/bin/x", b"")


def test_links_lead_nowhere_but_inside(box: Sandbox, tmp_path: Path):
    (tmp_path / "secret").write_text("host")
    box.commands.run(
        f"ln -s {tmp_path}/secret out; ln -s /../../../etc/hostname up; ln -s /proc/1/root/etc/shadow proc"
    )
    with pytest.raises(FileMissing):
        box.files.read("out")
    assert box.files.read("up") == b"dockyard\n"
    with pytest.raises(FileError):
        box.files.read("proc")


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_unusable_paths_are_refused(create, path: str):
    with pytest.raises((InvalidArgument, FileError)):
        create().files.read(path)


def test_the_root_is_not_removed(create):
    with pytest.raises(InvalidArgument):
        create().files.remove("/")


def test_a_directory_goes_in_and_comes_out(box: Sandbox, tmp_path: Path):
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (source / "a" / "b" / "run").chmod(0o755)
    (source / "empty").mkdir()
    (source / "link").symlink_to("/etc/passwd")
    assert box.files.upload_dir(source, "project") == 1
    assert box.commands.run("project/a/b/run").stdout == "ran\n"

    box.commands.run("mkfifo project/fifo; ln -s /etc/passwd project/out; ln -s .. project/loop")
    download = box.files.download_dir("project")
    assert download.files == {"a/b/run": b"#!/bin/sh\necho ran\n"}
    assert download.links == {"out": "/etc/passwd", "loop": ".."}
    assert set(download.directories) == {"a", "a/b", "empty"}
    assert download.skipped == ("fifo",)

    download.write_to(tmp_path / "target")
    assert (tmp_path / "target" / "a" / "b" / "run").read_bytes() == b"#!/bin/sh\necho ran\n"
    assert not (tmp_path / "target" / "out").is_symlink()


def test_a_download_is_bounded_in_all(box: Sandbox):
    box.commands.run("mkdir d; for i in 1 2 3; do head -c 1000 /dev/zero > d/$i; done")
    assert len(box.files.download_dir("d", max_bytes=3000).files) == 3
    with pytest.raises(FileTooLarge):
        box.files.download_dir("d", max_bytes=2999)


def test_a_tree_that_is_too_deep_is_refused(box: Sandbox):
    script = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"
    box.commands.run(["python3", "-c", script])
    with pytest.raises(UnsafePath, match="too deep"):
        box.files.download_dir(".")


def test_a_tree_of_paths_that_are_too_long_is_refused(box: Sandbox):
    """A command makes them; it is none of the caller's doing."""
    script = "import os\nfor _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)\nopen('a', 'w')"
    box.commands.run(["python3", "-c", script])
    with pytest.raises(UnsafePath, match="too deep"):
        box.files.download_dir(".")


@pytest.mark.parametrize("depth", [300, 5000])
def test_a_tree_of_any_depth_is_removed(box: Sandbox, depth: int):
    script = f"import os\nfor _ in range({depth}): open('f', 'w').close(); os.mkdir('d'); os.chdir('d')"
    box.commands.run(["python3", "-c", f"import os; os.mkdir('deep'); os.chdir('deep')\n{script}"])
    box.files.remove("deep")
    assert box.files.list() == ()


SWAP = """
import os
open("target", "w").close()
while True:
    os.mkdir("d/x"); os.rmdir("d/x")
    open("d/x", "w").close(); os.unlink("d/x")
    os.symlink("x", "d/x"); os.unlink("d/x")
    os.mkfifo("d/x"); os.unlink("d/x")
"""


def test_an_entry_that_keeps_changing_fails_no_download(box: Sandbox):
    box.files.write("d/steady", b"1")
    command = box.commands.start(["python3", "-c", SWAP])
    box.commands.run("until [ -e target ]; do sleep 0.01; done")
    for _ in range(300):
        assert box.files.download_dir("d").files["steady"] == b"1"
    command.kill()
    command.wait()


CHURN = """
import os, itertools
for number in itertools.count():
    os.makedirs(f"churn/{number % 10}/a/b", exist_ok=True)
    open(f"churn/{number % 10}/f", "w").close()
    if number == 20: open("ready", "w").close()
"""


def test_a_tree_that_keeps_growing_holds_nobody_up(box: Sandbox):
    command = box.commands.start(
        ["python3", "-c", f"import os\nwhile True:\n try: exec({CHURN!r})\n except OSError: pass"]
    )
    box.commands.run("until [ -e ready ]; do sleep 0.01; done")
    for _ in range(20):
        with suppress(FileError):  # it may be missing or not empty; what counts is that there is an answer
            box.files.remove("churn")
    command.kill()
    command.wait()
    box.files.make_dir("churn")
    box.files.remove("churn")
    assert not box.files.exists("churn")


def test_names_that_are_no_utf8(box: Sandbox):
    box.commands.run("touch $'\\xff\\xfe'")
    (entry,) = box.files.list()
    assert os.fsencode(entry.name) == b"\xff\xfe"
    box.files.write(entry.name, b"1")
    assert box.files.download_dir(".").files == {entry.name: b"1"}


def test_what_ends_in_dots_is_not_removed(box: Sandbox):
    box.files.write("a/file", "text")
    for path in ("a/..", "a/.", ".", "..", "/", "//", "/workspace/../", "/."):
        with pytest.raises(InvalidArgument, match="cannot be removed"):
            box.files.remove(path)
    assert box.files.read("a/file") == b"text"


def test_a_directory_that_is_named_by_a_link_is_sent_whole(box: Sandbox, tmp_path: Path):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "file").write_text("text")
    (tmp_path / "current").symlink_to("release")
    assert box.files.upload_dir(tmp_path / "current", "a") == 1
    assert box.files.read("a/file") == b"text"


def test_what_is_removed_as_it_is_made_holds_nobody_up(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sandbox.files.PATIENCE_S", 0.5)
    ask = box.files._ask

    def ask_and_lose(kind: Kind, place: str, *rest: int, **named: Any) -> int:
        """As an agent does that is always quicker."""
        done = ask(kind, place, *rest, **named)
        if kind == Kind.MKDIR:
            ask(Kind.REMOVE, place)
        return done

    monkeypatch.setattr(box.files, "_ask", ask_and_lose)
    with pytest.raises(FileMissing):
        box.files.make_dir("a/b/c")
    with pytest.raises(FileMissing):
        box.files.write("a/b/c", "text")


FILL = """
import itertools, os, sys
for number in itertools.count():
    try:
        os.makedirs("/workspace/d", exist_ok=True)
        os.close(os.open(f"/workspace/d/{sys.argv[1]}-{number}", os.O_CREAT))
    except OSError:
        pass
"""


def test_what_is_filled_as_it_is_emptied_holds_nobody_up(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sandbox.files.PATIENCE_S", 2.0)
    box.files.make_dir("d")
    fillers = [box.commands.start(["python3", "-c", FILL, str(number)]) for number in range(3)]
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(box.files.remove, "d")
        assert box.commands.run("echo on", timeout_s=60).stdout == "on\n"
        error = removed.exception(60)
    assert error is None or (isinstance(error, FileError) and error.errno == errno.EBUSY)
    for filler in fillers:
        filler.kill()
        filler.wait()
    monkeypatch.undo()
    with suppress(FileMissing):
        box.files.remove("d")
    assert not box.files.exists("d")


def test_what_no_descriptor_is_free_for_is_a_shortage_of_this_hosts(box: Sandbox):
    """Not a fault of the sandbox, which has opened it."""
    box.files.write("there", "text")
    with no_descriptor_left(), pytest.raises(CapacityError, match="Too many open files") as caught:
        box.files.read("there")
    assert caught.value.sandbox_id == box.id
    assert box.files.read("there") == b"text"
