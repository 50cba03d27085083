"""The toolkit: an interpreter, pip and pytest that every sandbox finds read-only at /opt/toolkit.

`python -m sandbox.toolkit --into DIR` makes it at set-up: a copy of the base interpreter (not of the
virtual environment that runs this) that works wherever it is put, with its own site directory. The same DIR
again does nothing, unless the interpreter or the list of packages has changed.

DIR is a link to DIR-STAMP, which is never written to once it is there. A new version is made beside the old
and the link replaced, so there is always one; sandboxes that run keep the one that they have mounted, and a
sweep removes it when nobody can have it any more.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Set
from pathlib import Path

from protocol.errors import DockyardError
from sandbox.elf import read_dynamic, replace_run_path
from sandbox.errors import InvalidArgument, StartError, UnsupportedError, translated
from sandbox.listings import age_s, owned
from sandbox.places import SUPERSEDED_S, default_state_dir, default_toolkit, make_folder
from sandbox.programs import run_program

TOOLKIT_VERSION = 2
PACKAGES = ("pip>=23,<27", "pytest>=8.3,<10", "pyyaml>=6,<7")
_STAMP = "VERSION"
_STAMP_DIGITS = 16  # in a version's name
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# Nothing that a program in a sandbox imports; together two thirds of the library's bytes.
_LEFT_OUT = ("test", "tests", "idlelib", "idle_test", "turtledemo", "lib2to3", "tkinter")
# EXTERNALLY-MANAGED is of the host's own packages, which are not here: pip would refuse to install for it.
_LEFT_OUT_PATTERNS = (
    *("site-packages", "dist-packages", "__pycache__", "config-*", "*.a", "EXTERNALLY-MANAGED"),
)
_PIP_NAMES = ("pip", "pip3", _PYTHON.replace("python", "pip"))  # hide the host's, whose packages are masked
# Finds its interpreter beside itself, so that it works wherever the toolkit is put.
_PIP = '#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/python3" -m pip "$@"\n'
# Mounted in every sandbox, so libraries that lie there need no copy. /usr/local is masked.
_SYSTEM_LIBRARIES = ("/usr/lib", "/lib", "/usr/lib64", "/lib64")


def build_toolkit(into: Path) -> bool:
    """Makes the toolkit; half a minute and 100 MB, blocks. False when the one there is current.

    Raises UnsupportedError when this interpreter cannot be copied, StartError when pip or the copy fails,
    InvalidArgument for a place where something else is. The toolkit appears as a whole, or not at all, and
    replaces an older one in one step.
    """
    with translated("making the toolkit"):
        return _build(into)


def _build(into: Path) -> bool:
    interpreter = _base_interpreter()
    stamp = _stamp(interpreter)
    if is_current(into, stamp):
        return False
    if os.path.lexists(into) and not (_is_of_ours(into) or (into.is_dir() and not any(into.iterdir()))):
        raise InvalidArgument(f"into={str(into)!r} is there, and no toolkit", hint="name a new place")
    make_folder(into.parent)
    version = _version(into, stamp)
    place = Path(tempfile.mkdtemp(prefix=f".toolkit-{os.getpid()}-", dir=into.parent))
    try:
        if not is_current(version, stamp):
            _make_version(place / "toolkit", version, interpreter, stamp)
        _point(into, version, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return True


def is_current(toolkit: Path, stamp: str | None = None) -> bool:
    """True when the toolkit is there and made of this interpreter and these packages."""
    return _read_stamp(toolkit) == (stamp or _stamp(_base_interpreter()))


def _is_of_ours(place: Path) -> bool:
    """A toolkit, or a link to where one was."""
    is_link = place.is_symlink() and place.readlink().name.startswith(f"{place.name}-")
    return is_link or re.fullmatch("[0-9a-f]{64}", _read_stamp(place) or "") is not None


def superseded(toolkit: Path, users: Set[int]) -> list[Path]:
    """Older versions of a toolkit, of these users, the latest of which was replaced a day ago or longer: by
    then the sandboxes that had it mounted, of whatever state directory, have ended."""
    if not toolkit.is_symlink() or age_s(toolkit) < SUPERSEDED_S:
        return []
    current = toolkit.resolve()
    beside = owned(sorted(toolkit.parent.glob(f"{toolkit.name}-*")), users)
    return [path for path in beside if path != current and _is_version(path, toolkit)]


def _version(toolkit: Path, stamp: str) -> Path:
    return toolkit.with_name(f"{toolkit.name}-{stamp[:_STAMP_DIGITS]}")


def _is_version(path: Path, toolkit: Path) -> bool:
    """Tells a toolkit of ours from a folder of somebody's with such a name."""
    stamp = _read_stamp(path)
    return stamp is not None and _version(toolkit, stamp) == path


def _read_stamp(toolkit: Path) -> str | None:
    path = toolkit / _STAMP
    try:
        return path.read_text() if path.is_file() else None
    except (FileNotFoundError, PermissionError, UnicodeDecodeError):  # it has just gone, or is none of ours
        return None


def _make_version(draft: Path, version: Path, interpreter: Path, stamp: str) -> None:
    """Makes it beside its place and moves it there; the first of two makers wins."""
    draft.mkdir(mode=0o755)
    draft.chmod(0o755)
    _fill(draft, interpreter)
    (draft / _STAMP).write_text(stamp)
    try:
        draft.rename(version)
    except OSError as error:
        if not is_current(version, stamp):
            hint = "delete it, and make the toolkit again"
            raise StartError(f"{version} is in the way", phase="toolkit", hint=hint) from error


def _point(into: Path, version: Path, place: Path) -> None:
    """Makes `into` a link to `version`, in one step."""
    if into.is_dir() and not into.is_symlink():
        into.rename(place / "old")  # a plain copy, which a link cannot replace in one step
    link = place / "link"
    link.symlink_to(version.name)
    link.replace(into)


def _base_interpreter() -> Path:
    named = getattr(sys, "_base_executable", "") or sys.executable
    candidates = (Path(sys.base_prefix) / "bin" / _PYTHON, Path(named))
    for candidate in candidates:
        if candidate.exists():
            return candidate.resolve()
    raise UnsupportedError(f"no interpreter under {sys.base_prefix}", hint="use a regular CPython")


def _stamp(interpreter: Path) -> str:
    facts = interpreter.stat()
    parts = (TOOLKIT_VERSION, sys.version, interpreter, facts.st_size, facts.st_mtime_ns, *PACKAGES)
    return hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()


def _fill(root: Path, interpreter: Path) -> None:
    (root / "bin").mkdir()
    target = root / "bin" / _PYTHON
    shutil.copy2(interpreter, target)
    target.chmod(0o755)
    for name in ("python3", "python"):
        (root / "bin" / name).symlink_to(_PYTHON)
    for name in _PIP_NAMES:
        (root / "bin" / name).write_text(_PIP)
        (root / "bin" / name).chmod(0o755)
    library = root / "lib" / _PYTHON
    _copy_library(library)
    _copy_shared_libraries(interpreter, library, root / "lib")
    _relocate(target, root / "lib")
    _install_packages(root, library)
    _open_for_reading(root)
    _try_out(root)


def _copy_library(target: Path) -> None:
    source = Path(sysconfig.get_path("stdlib"))
    ignore = shutil.ignore_patterns(*_LEFT_OUT, *_LEFT_OUT_PATTERNS)
    shutil.copytree(source, target, ignore=ignore, symlinks=False, ignore_dangling_symlinks=True)
    dynamic = Path(sysconfig.get_path("platstdlib")) / "lib-dynload"
    if not (target / "lib-dynload").exists() and dynamic.is_dir():
        shutil.copytree(dynamic, target / "lib-dynload")
    # Debian looks for packages in dist-packages, everyone else in site-packages.
    (target / "site-packages").mkdir()
    (target / "dist-packages").symlink_to("site-packages")
    (target.parent / "python3").mkdir()
    (target.parent / "python3" / "dist-packages").symlink_to(f"../{_PYTHON}/site-packages")


def _copy_shared_libraries(interpreter: Path, library: Path, into: Path) -> None:
    """Copies what the interpreter and its modules link to and no sandbox has."""
    for program in (interpreter, *sorted((library / "lib-dynload").glob("*.so"))):
        for path in _linked_libraries(program):
            if not _is_visible(path) and not (into / path.name).exists():
                shutil.copy2(path, into / path.name)


def _linked_libraries(program: Path) -> list[Path]:
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    found = [line.split("=>")[1].split(" (")[0].strip() for line in listing.splitlines() if "=>" in line]
    return [Path(each) for each in found if each.startswith("/")]


def _is_visible(library: Path) -> bool:
    return any(library.is_relative_to(each) for each in _SYSTEM_LIBRARIES)


def _relocate(program: Path, libraries: Path) -> None:
    """Lets the copy find the libraries that were copied with it."""
    dynamic = read_dynamic(program)
    if dynamic is None or not any((libraries / name).exists() for name in dynamic.needed):
        return
    if any(text.startswith("$ORIGIN") for _, text in dynamic.run_paths):
        return
    if not replace_run_path(program, "$ORIGIN/../lib"):
        raise UnsupportedError(
            f"{program.name} links to a shared library at a fixed place and cannot be moved",
            hint="use a Python that is linked statically, or one built with a run path",
        )


def _install_packages(root: Path, library: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--root-user-action", "ignore", "--target", str(library / "site-packages")]
    done = run_program([*command, *PACKAGES])
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise StartError(f"installing {', '.join(PACKAGES)} failed: {last}", phase="toolkit")
    shutil.rmtree(library / "site-packages" / "bin", ignore_errors=True)  # for the interpreter that ran pip
    subprocess.run(
        [str(root / "bin" / "python3"), "-I", "-m", "compileall", "-q", "-j", "0", str(library)],
        capture_output=True,
        check=False,  # only a matter of start-up time
    )


def _open_for_reading(root: Path) -> None:
    """Whatever the umask and the source's modes: a sandbox's uid is nobody here, and nobody else writes."""
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod((path.stat().st_mode | (0o555 if path.is_dir() else 0o444)) & ~0o022)


def _try_out(root: Path) -> None:
    """Runs the copy from where it is, with nothing of this environment."""
    check = "import sys, ssl, sqlite3, ctypes, zlib, ensurepip, venv, pip, pytest, yaml; print(sys.prefix)"
    done = subprocess.run(
        [str(root / "bin" / "python3"), "-I", "-c", check],
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    if done.returncode != 0 or Path(done.stdout.strip()).resolve() != root.resolve():
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        hint = "on Debian, install python3-venv" if "ensurepip" in " ".join(said) else ""
        what = f"the copied interpreter does not work: {' '.join(said)}"
        raise StartError(what, phase="toolkit", hint=hint)


def main() -> None:
    """Command line; one line on standard output."""
    parser = argparse.ArgumentParser(description="Make the toolkit that sandboxes find at /opt/toolkit.")
    words = "default: where `Sandbox.create` looks for it"
    parser.add_argument("--into", type=Path, metavar="DIR", help=words)
    given: Path | None = parser.parse_args().into
    try:
        into = default_toolkit(default_state_dir()) if given is None else given
        print(f"{into}: {'made' if build_toolkit(into.absolute()) else 'up to date'}")
    except DockyardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
