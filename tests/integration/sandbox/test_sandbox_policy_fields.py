"""What a policy narrows is narrow inside, on each substrate; without the field the probe goes through."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import Policy, Sandbox, TerminalSize
from sandbox.errors import FileMissing, InvalidArgument, PathDenied, PolicyDenied, UnsupportedError
from sandbox.layers.choice import choose

Create = Callable[..., Sandbox]
# Type of device, and how many bytes a read gives.
DEVICES = """
import os, sys
for name in sys.argv[1:]:
    fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK)
    number = os.fstat(fd).st_rdev
    print(name, os.major(number), os.minor(number), len(os.read(fd, 9)))
"""
PTY = "import os; print(os.ttyname(os.openpty()[1]))"
# Ends with what the kernel says to changing a file's mode, its times, its name, and to making one beside it.
CHANGES = """
import os, sys
def attempt(do, *arguments):
    try:
        do(*arguments)
        return "done"
    except OSError as error:
        return os.strerror(error.errno)
place = sys.argv[1]
print(attempt(os.chmod, place, 0o777), attempt(os.utime, place), attempt(os.mkdir, f"{place}/new"), sep="; ")
"""


def probe(box: Sandbox, script: str, *words: str) -> str:
    result = box.commands.run(["python3", "-c", script, *words])
    return (result.stdout + result.stderr).strip()


def test_no_process_has_a_capability(create: Create, substrate: str):
    box = create(substrate=substrate)
    said = box.commands.run("grep Cap /proc/self/status").stdout
    assert {line.split()[1] for line in said.splitlines()} == {"0" * 16}
    assert box.commands.run("grep NoNewPrivs /proc/self/status").stdout.split()[1] == "1"
    outside = Path("/proc/self/status").read_text()
    assert os.geteuid() != 0 or "CapEff:\t0000000000000000" not in outside


def test_a_device_that_is_left_out_is_the_null_device(create: Create, substrate: str):
    names = ("zero", "random", "urandom")
    narrow = create(substrate=substrate, policy=Policy(devices=frozenset({"urandom"})))
    assert probe(narrow, DEVICES, *names).splitlines() == ["zero 1 3 0", "random 1 3 0", "urandom 1 9 9"]
    assert probe(create(substrate=substrate), DEVICES, *names).splitlines() == [
        "zero 1 5 9", "random 1 8 9", "urandom 1 9 9",
    ]  # fmt: skip
    assert narrow.commands.run("echo x > /dev/null").ok


def test_without_ptmx_there_is_no_terminal(create: Create, substrate: str):
    narrow = create(substrate=substrate, policy=Policy(devices=frozenset({"tty"})))
    assert "/dev/pts" not in probe(narrow, PTY)
    with pytest.raises(PolicyDenied, match="terminal") as caught:
        narrow.commands.start("tty", terminal=TerminalSize(24, 80))
    assert caught.value.field == "devices"
    assert narrow.commands.run("echo on").stdout == "on\n"
    assert probe(create(substrate=substrate), PTY).startswith("/dev/pts/")


def test_a_masked_place_shows_nothing(create: Create, substrate: str):
    look = "ls /usr/share | wc -l; cat /usr/lib/os-release /proc/version 2>/dev/null | wc -c"
    places = ("/usr/share", "/usr/lib/os-release", "/proc/version")
    narrow = create(substrate=substrate, policy=Policy(masked=places))
    assert narrow.commands.run(look).stdout.split() == ["0", "0"]
    entries, size = create(substrate=substrate).commands.run(look).stdout.split()
    assert (int(entries) > 0, int(size) > 0) == (True, True)
    made = narrow.commands.run(
        "touch /usr/share/a; umount /usr/share; mount --move /usr/share /tmp; ls /usr/share"
    )
    assert made.stdout == ""
    with pytest.raises(PathDenied) as caught:
        narrow.files.write("/usr/share/a", b"x")
    assert caught.value.field == "masked"


def test_what_a_masked_place_does_not_show_is_said_to_be_the_policys(create: Create, substrate: str):
    places = ("/usr/share", "/usr/lib/os-release", "/proc/version")
    files = create(substrate=substrate, policy=Policy(masked=places)).files
    for place in ("/usr/share/a", "/usr/share/a/b", *places[1:]):
        for call in (files.read, files.list, files.remove, lambda at: files.write(at, b"x")):
            with pytest.raises(PathDenied, match="the policy has it in `masked`") as caught:
                call(place)
            assert caught.value.field == "masked"
    with pytest.raises(PathDenied):
        files.stat("/usr/share/a")
    assert not files.exists("/usr/share/a")
    assert files.list("/usr/share") == ()
    with pytest.raises(FileMissing):
        files.read("/usr/nothing")


def test_a_read_only_place_is_not_written_to(create: Create, substrate: str):
    narrow = create(substrate=substrate, policy=Policy(read_only=("/var/tmp", "/root")))
    for place in ("/var/tmp", "/root"):
        assert "done" not in probe(narrow, CHANGES, place)
        assert probe(create(substrate=substrate), CHANGES, place) == "done; done; done"
        with pytest.raises(PathDenied) as caught:
            narrow.files.write(f"{place}/a", b"x")
        assert caught.value.field == "read_only"
        assert narrow.files.list(place) == ()
    assert narrow.commands.run("touch /workspace/a /tmp/a").ok


@pytest.mark.parametrize("places", [("/var/tmp", "/var"), ("/var", "/var/tmp"), ("/var",)])
def test_a_place_within_a_read_only_one_is_not_written_to(
    create: Create, substrate: str, places: tuple[str, ...]
):
    narrow = create(substrate=substrate, policy=Policy(read_only=places))
    assert "done" not in probe(narrow, CHANGES, "/var/tmp")
    assert probe(narrow, CHANGES, "/root") == "done; done; done"


@pytest.mark.parametrize(
    "place", ["/proc", "/sys", "/tmp", "/run", "/opt", "/opt/toolkit", "/workspace", "/usr"]
)
def test_what_a_sandbox_mounts_can_be_read_only(create: Create, substrate: str, place: str):
    narrow = create(substrate=substrate, policy=Policy(read_only=(place,)))
    assert "done" not in probe(narrow, CHANGES, place)
    assert narrow.commands.run("echo x > /dev/null && echo x > /dev/shm/a").ok
    assert narrow.sessions.create().run("cd /usr; pwd").stdout == "/usr\n"


def test_dev_is_read_only_but_for_what_programs_need(create: Create, substrate: str):
    with pytest.raises(InvalidArgument, match=r"read_only=.*/dev is read-only in every sandbox"):
        create(substrate=substrate, policy=Policy(read_only=("/dev",)))
    box = create(substrate=substrate)
    assert "done" not in probe(box, CHANGES, "/dev")
    assert box.commands.run("echo x > /dev/null && echo x > /dev/shm/a").ok


def test_a_read_only_file_of_the_kernels_is_not_written_to(create: Create, substrate: str):
    narrow = create(substrate=substrate, policy=Policy(read_only=("/proc/sys",)))
    assert not narrow.commands.run("echo 1 > /proc/sys/kernel/ns_last_pid").ok
    assert narrow.commands.run("cat /proc/sys/kernel/ostype").stdout == "Linux\n"


def test_what_the_image_does_not_have_is_refused_before_anything_is_made(create: Create, substrate: str):
    for field, place in (("masked", "/usr/no-such-place"), ("read_only", "/workspace/tests")):
        with pytest.raises(InvalidArgument, match=f"{field}: '{place}'"):
            create(substrate=substrate, policy=Policy.model_validate({field: [place]}))


def test_what_cannot_be_masked_as_a_whole_is_refused_by_its_field(create: Create, substrate: str):
    with pytest.raises(InvalidArgument, match=r"masked: '/var/' has /var/tmp in it"):
        create(substrate=substrate, policy=Policy(masked=("/var/",)))
    narrow = create(substrate=substrate, policy=Policy(masked=("/var/tmp",), read_only=("/var",)))
    assert not narrow.commands.run("touch /var/tmp/a").ok


def test_places_within_masked_ones_are_masked_with_them(create: Create, substrate: str):
    places = ("/usr/share", "/usr/share/doc", "/usr/share/", "/usr/share/perl")
    narrow = create(substrate=substrate, policy=Policy(masked=places, read_only=("/usr/share/doc", "/root")))
    assert narrow.commands.run("ls -A /usr/share").stdout == ""
    assert not narrow.commands.run("touch /root/a").ok


def test_a_call_may_ask_for_less_time_and_output_and_not_for_more(create: Create):
    box = create(policy=Policy(max_timeout_s=1, output_total_bytes=10_000))
    for wish, field in (
        ({"timeout_s": 2}, "max_timeout_s"),
        ({"output_bytes": 10_001}, "output_total_bytes"),
    ):
        with pytest.raises(PolicyDenied) as caught:
            box.commands.run("true", **wish)
        assert caught.value.field == field
        with pytest.raises(PolicyDenied):
            box.sessions.create().run("true", **wish)
    assert box.commands.run("sleep 60").reason == "timeout"
    assert box.commands.run("sleep 60", timeout_s=0.1).reason == "timeout"
    assert box.commands.run("yes").reason == "output_limit"
    assert len(box.commands.run("yes", output_bytes=100).stdout_bytes) < 200


def test_forks_and_snapshots_are_as_narrow(create: Create, state_dir: Path):
    if os.geteuid() != 0:
        pytest.skip("freezing needs root")
    box = create(policy=Policy(read_only=("/root",), masked=("/usr/share",)))
    child = box.fork_fs()
    try:
        assert not child.commands.run("touch /root/a").ok
        assert child.commands.run("ls /usr/share").stdout == ""
    finally:
        child.kill()


def test_a_preset_says_where_what_is_written_lies(create: Create, state_dir: Path):
    def layer(**options: object) -> str:
        return create(**options).info.limits.layer

    try:
        disk = choose("disk", state_dir)
    except UnsupportedError:
        disk = "memory"
    assert layer(policy=Policy(layer="disk-first")) == disk
    assert layer(policy=Policy(layer="disk-first"), layer="memory") == "memory"
    assert layer(policy=Policy()) == "memory"


def test_memory_by_default_is_said(create: Create, state_dir: Path):
    def said(**options: object) -> bool:
        return any("a layer on disk" in each for each in create(**options).info.shortfalls)

    assert said()
    assert not said(layer="memory")
    try:
        choose("disk", state_dir)
    except UnsupportedError:
        assert said(policy=Policy(layer="disk-first"))
        return
    assert not said(layer="disk")
