"""What of an image a policy covers: places that show nothing, places that are not written to, devices that
are the null device. Checked against the image before anything is made, and mounted by the substrate.

Only what the image has can be covered: a mount needs something to lie on, and a place in a writable
directory could be renamed with the mount on it, after which its name would be free. Such places are
`Policy.protected` and `Policy.hidden`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import InvalidArgument
from sandbox.images import Image
from sandbox.policy import Policy
from sandbox.policy.document import Device
from sandbox.policy.paths import lies_in, plain

_OF_A_PROCESS = ("self", "thread-self")


@dataclass(frozen=True, slots=True)
class Covers:
    """Absolute places in the sandbox, all of them there and none reached by a link."""

    masked_directories: tuple[str, ...] = ()
    masked_files: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()  # to be the null device

    def writable(self, places: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the image's writable directories that stay so."""
        covers = (*self.read_only, *self.masked_directories)
        return tuple(
            place for place in places if not any(place == cover or lies_in(place, cover) for cover in covers)
        )


def covers_of(policy: Policy, image: Image) -> Covers:
    """Raises InvalidArgument, which names the field, for a place that the image does not have, that a link
    leads to or that lies in a writable directory; and for a masked one that has a writable directory in it.
    """
    masked = _outermost(_found("masked", place, image) for place in policy.masked)
    hidden = [place for place, _ in masked]
    # A runtime mounts each with what is mounted below, where an inner one would be writable again.
    found = _outermost(_found("read_only", place, image) for place in policy.read_only)
    read_only = [each for each in found if not any(lies_in(each[0], place) for place in hidden)]
    return Covers(
        masked_directories=tuple(place for place, on_host in masked if on_host.is_dir()),
        masked_files=tuple(place for place, on_host in masked if not on_host.is_dir()),
        read_only=tuple(place for place, _ in read_only),
        devices=policy.left_out,
    )


def _found(field: str, place: str, image: Image) -> tuple[str, Path]:
    """The place without needless slashes, and where the host has it."""
    at = plain(place)
    for directory in image.writable:
        if lies_in(at, directory):
            instead = "hidden" if field == "masked" else "protected"
            raise _refused(field, place, f"lies in {directory}, which is written to", f"use `{instead}`")
        if field == "masked" and lies_in(directory, at):
            hint = f"name places beside {directory}, or {directory} itself"
            raise _refused(field, place, f"has {directory} in it, which is written to", hint)
    root, parts = _source(at, image)
    for path in _walk(root, parts):
        if path.is_symlink():
            raise _refused(field, place, "is reached by a link", "name the place that it leads to")
        if not path.exists():
            raise _refused(field, place, "is not in the image", "leave it out")
    if at.startswith("/proc/") and (parts[0].isdecimal() or parts[0] in _OF_A_PROCESS):
        raise _refused(field, place, "is one process's", "name a file of the machine's, such as /proc/kcore")
    return at, root.joinpath(*parts)


def _outermost(found: Iterable[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Without what lies in another one, of which nothing is there to lie a mount on."""
    once = list(dict.fromkeys(found))
    return [each for each in once if not any(lies_in(each[0], other) for other, _ in once)]


def _source(place: str, image: Image) -> tuple[Path, list[str]]:
    """The host's directory that is shown there, and the rest of the way."""
    shown = {bind.target: bind.source for bind in image.binds} | {"/proc": Path("/proc")}
    for target in sorted(shown, key=len, reverse=True):
        if place == target or lies_in(place, target):
            return shown[target], place[len(target) :].split("/")[1:]
    return image.skeleton, place.split("/")[1:]


def _walk(root: Path, parts: list[str]) -> Iterator[Path]:
    for count in range(1, len(parts) + 1):
        yield root.joinpath(*parts[:count])


def _refused(field: str, place: str, why: str, hint: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {place!r} {why}", hint=hint)
