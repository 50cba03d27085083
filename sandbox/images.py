"""Images: what a sandbox's root is made of. First cut: `host`, which needs no download and no root.

`host` shows this machine's /usr read-only, without what the site has put there (/usr/local and
dist-packages, which may hold the very package that a task is about), a minimal /etc, and the toolkit.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sandbox.drafts import discard, discard_left
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.listings import age_s, list_folder
from sandbox.places import SUPERSEDED_S, make_folder

SKELETON_VERSION = 3
TOOLKIT_AT = "/opt/toolkit"
INIT_AT = "/.dockyard/init"

_DIRECTORIES = (
    ".dockyard/empty",  # what masked places show
    *("dev", "etc", "opt/toolkit", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", "workspace"),
)
_WRITABLE = ("/workspace", "/tmp", "/root", "/var/tmp")
# Where the host keeps these as links into /usr, so does the image; elsewhere they are mounted too.
_USR_TWINS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MASKED_PACKAGES = ("dist-packages", "site-packages")  # of every interpreter in /usr/lib
_Stamp = tuple[int, int, int]  # inode, time of change, size
_LIBRARIES = Path("/usr/lib")
# What an image follows from.
_SOURCES = tuple(map(Path, ("/", "/usr", "/bin", "/etc/ld.so.cache", "/etc/alternatives")))
_COPIED = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost dockyard\n::1\tlocalhost\n",
    "hostname": "dockyard\n",
    # No question after a newer pip, no advice against root, and no copy of what is installed in its memory.
    "pip.conf": "[global]\ndisable-pip-version-check = 1\nroot-user-action = ignore\nno-cache-dir = 1\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "nameserver 127.0.0.1\n",  # where our resolver listens, if there is a network
}


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory, mounted read-only, nosuid and nodev at `target` in the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system: `skeleton` below, `binds` on it, `masks` over those, `writable` directories owned
    by the sandbox. `skeleton` is never written to once it is there."""

    name: str
    skeleton: Path
    binds: tuple[Bind, ...]
    masks: tuple[str, ...]
    writable: tuple[str, ...]
    shell: str
    env: Mapping[str, str]


def prepare_image(name: str, *, state_dir: Path, init: Path, toolkit: Path) -> Image:
    """The image of that name, its skeleton made if this is the first use (milliseconds; blocks).

    Raises InvalidArgument for an unknown name, UnsupportedError for a missing init or toolkit.
    """
    if name != "host":
        raise InvalidArgument(f"image={name!r} is unknown", hint="the image of this version is 'host'")
    built, has_python = _stamp(init), _stamp(toolkit / "bin" / "python3")
    if built is None:
        hint = "run `make setup`, or build it with `python -m sandbox.native.build`"
        raise UnsupportedError(f"{init} is not there", capability="static init", hint=hint)
    if has_python is None:
        hint = f"run `make setup`, or make it with `python -m sandbox.toolkit --into {toolkit}`"
        raise UnsupportedError(f"no toolkit at {toolkit}", capability="toolkit", hint=hint)
    libraries = _stamp(_LIBRARIES)
    places = (*_SOURCES, *_interpreters(libraries))
    image = _host(state_dir, init, toolkit, (built, has_python, libraries, *map(_stamp, places)))
    if not image.skeleton.is_dir():
        _make_skeleton(image.skeleton, init)
    return image


@lru_cache(maxsize=16)
def _host(state_dir: Path, init: Path, toolkit: Path, stamps: tuple[_Stamp | None, ...]) -> Image:
    """Looked at anew when something that it is made of has changed: every create asks."""
    del stamps
    twins = tuple(Bind(Path("/", each), f"/{each}") for each in _USR_TWINS if _is_real_directory(each))
    return Image(
        name="host",
        skeleton=_skeleton(state_dir, init),
        binds=(Bind(Path("/usr"), "/usr"), *twins, Bind(toolkit.resolve(), TOOLKIT_AT)),
        masks=_masks(),
        writable=_WRITABLE,
        shell="/bin/bash" if Path("/bin/bash").exists() else "/bin/sh",
        env={
            # pip puts programs into the last one, where they hide none of the image's
            "PATH": f"{TOOLKIT_AT}/bin:/usr/bin:/bin:/usr/sbin:/sbin:/root/.local/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
        },
    )


def _stamp(path: Path) -> _Stamp | None:
    """Another when the file has changed, or when another name is in the directory. None where it is not."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _masks() -> tuple[str, ...]:
    """The site's own: what is in them is not of the image."""
    interpreters = _interpreters(_stamp(_LIBRARIES))
    found = (interpreter / name for name in _MASKED_PACKAGES for interpreter in interpreters)
    return tuple(str(place) for place in (Path("/usr/local"), *found) if place.exists())


@lru_cache(maxsize=4)
def _interpreters(stamp: _Stamp | None) -> tuple[Path, ...]:
    """Listed anew when the directory has changed, which is large."""
    del stamp
    return tuple(sorted(_LIBRARIES.glob("python3*")))


def superseded(state_dir: Path, init: Path) -> list[Path]:
    """Skeletons of keys that hold no more, when the one that holds is a day old or older."""
    current = _skeleton(state_dir, init) if init.is_file() else None
    if current is None or age_s(current) < SUPERSEDED_S:
        return []
    return [path for path in list_folder(current.parent, "host-*") if path != current]


def _skeleton(state_dir: Path, init: Path) -> Path:
    return state_dir / "images" / f"host-{_skeleton_key(init)}"


def _skeleton_key(init: Path) -> str:
    """Changes with everything that a skeleton holds a copy of."""
    facts = [str(SKELETON_VERSION), str(init.stat().st_mtime_ns), str(init.stat().st_size)]
    for name in ("ld.so.cache", "alternatives"):
        path = Path("/etc", name)
        facts.append(str(path.stat().st_mtime_ns) if path.exists() else "")
    return hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]


def _make_skeleton(skeleton: Path, init: Path) -> None:
    """Makes it beside its place and moves it there: no one ever sees half of it, and the first of two makers
    wins."""
    make_folder(skeleton.parent, 0o700)  # or others would put files into every /tmp, by the skeleton's
    discard_left()
    draft = Path(tempfile.mkdtemp(prefix=f"draft-{os.getpid()}-", dir=skeleton.parent))
    try:
        _fill_skeleton(draft, init)
        draft.rename(skeleton)
    except OSError:
        discard(draft)
        if not skeleton.is_dir():
            raise


def _fill_skeleton(root: Path, init: Path) -> None:
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in _USR_TWINS:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
        elif _is_real_directory(name):
            (root / name).mkdir()
    for name in _COPIED:
        source, target = Path("/etc", name), root / "etc" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copy2(source, target)
    for name, text in _WRITTEN.items():
        (root / "etc" / name).write_text(text)
    (root / "etc" / "os-release").symlink_to("../usr/lib/os-release")
    shutil.copyfile(init, root / INIT_AT[1:])
    (root / INIT_AT[1:]).chmod(0o555)
    _open_for_reading(root)
    for place in _WRITABLE:
        (root / place[1:]).chmod(0o1777 if "tmp" in place else 0o755)


def _open_for_reading(root: Path) -> None:
    """Whatever the umask: the sandbox reads all of it, and writes none of it even where its uid is the
    owner's, since it has no capability to override modes."""
    for directory, names, files in os.walk(root):
        for name in (".", *names):
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod(0o555)
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o555 | 0o444)


def _is_real_directory(name: str) -> bool:
    path = Path("/", name)
    return path.is_dir() and not path.is_symlink()
