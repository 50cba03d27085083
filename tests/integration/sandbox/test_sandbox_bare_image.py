"""Init needs nothing of the image, and no mount of a sandbox gives a program power."""

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from sandbox import Sandbox, TerminalSize
from sandbox.errors import InvalidArgument
from sandbox.images import INIT_AT, Image
from sandbox.places import INIT_BINARY

Create = Callable[..., Sandbox]
DIRECTORIES = (".dockyard/empty", "bin", "lib", "lib64", "etc", "dev", "proc", "sys", "tmp", "workspace")
# Linked to nothing. With one argument it prints that and a line of its input, with two it ends with the errno
# of opening the second.
PROGRAM = r"""
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
int main(int argc, char **argv) {
    char line[64];
    if (argc == 3) return open(argv[2], O_RDONLY) < 0 ? errno : 0;
    printf("%d %s %s\n", argc, argv[1], fgets(line, sizeof line, stdin) ? line : "nothing");
    return argc;
}
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """An image with no shell, no library, no program and no file in /etc: with init alone."""
    root = tmp_path / "bare"
    for name in DIRECTORIES:
        (root / name).mkdir(parents=True)
    (root / INIT_AT[1:]).write_bytes(INIT_BINARY.read_bytes())
    (root / INIT_AT[1:]).chmod(0o555)
    (root / "tmp").chmod(0o1777)
    image = Image("bare", root, (), (), ("/workspace", "/tmp"), "/bin/sh", MappingProxyType({}))
    monkeypatch.setattr("sandbox.making.prepare_image", lambda *args, **options: image)
    return image


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("static")
    (folder / "a.c").write_text(PROGRAM)
    done = subprocess.run(
        ["gcc", "-static", "-O1", "-o", folder / "a", folder / "a.c"], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("no compiler that links statically")
    return (folder / "a").read_bytes()


def test_files_and_static_programs_work_in_an_empty_image(
    create: Create, bare: Image, substrate: str, program: bytes
):
    box = create(substrate=substrate)
    assert [each.name for each in box.files.list("/bin")] == []
    box.files.write("/workspace/deep/a", b"1")
    box.files.rename("/workspace/deep/a", "/workspace/b")
    assert box.files.read("/workspace/b") == b"1"
    box.files.remove("/workspace/deep")
    box.files.write("/workspace/run", program, mode=0o755)
    result = box.commands.run(["/workspace/run", "x"], stdin="line")
    assert (result.exit_code, result.stdout) == (2, "2 x line\n")
    terminal = box.commands.start(["/workspace/run", "y"], stdin=None, terminal=TerminalSize(9, 9))
    terminal.send_stdin("typed\n")
    assert terminal.wait(30).exit_code == 2


def test_what_is_not_in_the_image_is_said_as_a_shell_says_it(create: Create, bare: Image, substrate: str):
    box = create(substrate=substrate)
    missing = box.commands.run("echo no shell")
    assert (missing.exit_code, missing.stdout) == (127, "")
    assert "cannot run the program" in missing.stderr
    with pytest.raises(InvalidArgument, match="cwd"):
        box.commands.run(["/workspace/run"], cwd="/usr")
    assert box.is_running


def mounts(box: Sandbox) -> dict[str, set[str]]:
    """Options of each mount point, those of the mount itself."""
    lines = box.commands.run("cat /proc/self/mountinfo").stdout.splitlines()
    return {line.split()[4]: set(line.split()[5].split(",")) for line in lines}


def test_every_mount_is_nosuid_and_all_but_devices_are_nodev(create: Create, substrate: str):
    found = mounts(create(substrate=substrate))
    assert {"/", "/usr", "/proc", "/dev", "/opt/toolkit"} <= found.keys()
    devices = {
        place for place in found if place.startswith("/dev/") and place not in ("/dev/shm", "/dev/mqueue")
    }
    masked = {place for place in found if place.startswith("/proc/")}  # the null device, shown there
    for place, options in found.items():
        assert "nosuid" in options or place in devices | masked, place
        assert "nodev" in options or place in devices | masked | {"/dev"}, place
    for place in ("/usr", "/opt/toolkit"):
        assert "ro" in found[place]


def test_a_set_user_id_program_of_the_image_gives_nothing(create: Create, substrate: str):
    """The host's own have the bit in the image too; it is the mount, and no_new_privs, that say no."""
    box = create(substrate=substrate)
    found = box.commands.run("find /usr/bin -perm -4000 -type f | head -1").stdout.strip()
    if not found:
        pytest.skip("this host has no such program")
    assert Path(found).stat().st_mode & stat.S_ISUID
    said = box.commands.run(
        ["python3", "-c", f"import os; print(os.statvfs({found!r}).f_flag & os.ST_NOSUID)"]
    )
    assert said.stdout.strip() == str(os.ST_NOSUID)


def test_a_device_file_in_the_image_cannot_be_opened(
    create: Create, bare: Image, substrate: str, program: bytes
):
    if os.geteuid() != 0:
        pytest.skip("only root makes device files")
    os.mknod(bare.skeleton / "etc/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with (bare.skeleton / "etc/null").open("rb") as opened:  # on the host it is the null device
        assert opened.read(1) == b""
    box = create(substrate=substrate)
    box.files.write("/workspace/run", program, mode=0o755)
    assert box.commands.run(["/workspace/run", "open", "/etc/null"]).exit_code == errno.EACCES
    assert box.commands.run(["/workspace/run", "open", "/dev/null"]).exit_code == 0
