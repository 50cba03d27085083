"""Paths of a sandbox, as its owner gives them. Pure."""

import posixpath

from sandbox.arguments import check_type
from sandbox.errors import InvalidArgument
from sandbox.texts import system_bytes

WORKDIR = "/workspace"
MAX_PATH_BYTES = 4095
MAX_DIRECTORY_BYTES = MAX_PATH_BYTES - 256  # with a name in it


def absolute(path: str) -> str:
    """Relative ones begin at /workspace. InvalidArgument for what no system call takes."""
    check_type("path", path, str)
    place = posixpath.join(WORKDIR, path)
    if path == "" or "\0" in path:
        raise InvalidArgument(f"path={path!r} is not usable")
    if len(system_bytes("path", place)) > MAX_PATH_BYTES:
        words = f"path of {len(place)} characters is too long"
        raise InvalidArgument(words, hint=f"at most {MAX_PATH_BYTES} bytes")
    return place
