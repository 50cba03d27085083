"""The few functions of libbpf that loading, attaching and maps take, over ctypes. Each raises OSError."""

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

_NAMES = ("libbpf.so.1",)
_MOST_DESCRIPTORS = 32  # that are open at a time while an object of ours is loaded (22), with some to spare
_ALLOW_MULTI = 2  # beside programs of groups above, all of which must agree
_TC_POINTS, _TCX_KINDS = (1, 2), (46, 47)  # what comes in, what goes out

# enum bpf_attach_type, by the names of our programs.
ATTACH_TYPES = {
    **{"egress": 1, "sock_create": 2, "bind4": 8, "bind6": 9, "connect4": 10, "connect6": 11},
    **{"sendmsg4": 14, "sendmsg6": 15},
}

_OnSample = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)


class _Hook(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t), ("ifindex", c_int), ("attach_point", c_int), ("parent", c_uint32),
        ("padding", c_uint32),
    )  # fmt: skip


class _Options(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t), ("program", c_int), ("flags", c_uint32), ("id", c_uint32), ("handle", c_uint32),
        ("priority", c_uint32), ("padding", c_uint32),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "libbpf_set_print": (c_void_p, (c_void_p,)),
    "bpf_object__open_file": (c_void_p, (c_char_p, c_void_p)),
    "bpf_object__load": (c_int, (c_void_p,)),
    "bpf_object__close": (None, (c_void_p,)),
    "bpf_object__find_program_by_name": (c_void_p, (c_void_p, c_char_p)),
    "bpf_object__find_map_fd_by_name": (c_int, (c_void_p, c_char_p)),
    "bpf_program__fd": (c_int, (c_void_p,)),
    "bpf_program__attach_lsm": (c_void_p, (c_void_p,)),
    "bpf_link__destroy": (c_int, (c_void_p,)),
    "bpf_prog_get_next_id": (c_int, (c_uint32, POINTER(c_uint32))),
    "bpf_map_get_next_id": (c_int, (c_uint32, POINTER(c_uint32))),
    "bpf_prog_attach": (c_int, (c_int, c_int, c_int, c_uint32)),
    "bpf_map_update_elem": (c_int, (c_int, c_char_p, c_char_p, c_uint64)),
    "bpf_map_lookup_elem": (c_int, (c_int, c_char_p, c_char_p)),
    "bpf_map_delete_elem": (c_int, (c_int, c_char_p)),
    "bpf_tc_hook_create": (c_int, (POINTER(_Hook),)),
    "bpf_tc_attach": (c_int, (POINTER(_Hook), POINTER(_Options))),
    "ring_buffer__new": (c_void_p, (c_int, _OnSample, c_void_p, c_void_p)),
    "ring_buffer__consume": (c_int, (c_void_p,)),
    "ring_buffer__epoll_fd": (c_int, (c_void_p,)),
    "ring_buffer__free": (None, (c_void_p,)),
}


@cache
def load_library() -> ctypes.CDLL:
    """libbpf with its functions declared. OSError when it is not installed."""
    _check_descriptors()
    library = ctypes.CDLL(_NAMES[0], use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.libbpf_set_print(None)  # it would print to our standard error
    return library


def _check_descriptors() -> None:
    """OSError (EMFILE) where too few are free. libbpf tries what the kernel can, and takes a trial that had
    none for what it cannot, as long as the process lives."""
    with ExitStack() as taken:
        for _ in range(_MOST_DESCRIPTORS):
            taken.callback(os.close, os.open("/", os.O_PATH | os.O_CLOEXEC))


class BpfObject:
    """A loaded object: its programs and maps live while it is open, or attached to something that does. Not
    thread-safe but for the maps."""

    def __init__(self, path: Path) -> None:
        """Loads it; some ten milliseconds. OSError when the kernel refuses."""
        self._library = load_library()
        _check_descriptors()
        self._links: list[int] = []
        self._object = self._library.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise _error(f"open {path}")
        if self._library.bpf_object__load(self._object) != 0:
            error = _error(f"load {path}")
            self.close()
            raise error

    def close(self) -> None:
        """Lets go of it; security hooks are the kernel's own again. Idempotent."""
        while self._links:
            self._library.bpf_link__destroy(self._links.pop())
        if self._object:
            self._library.bpf_object__close(self._object)
        self._object = None

    def map(self, name: str) -> "BpfMap":
        """One of its maps, valid while the object is open."""
        fd = self._library.bpf_object__find_map_fd_by_name(self._object, name.encode())
        if fd < 0:
            raise _error(f"find map {name}")
        return BpfMap(self._library, fd, name)

    def attach(self, name: str, group: int) -> None:
        """Attaches a program to a cgroup (a descriptor of its directory), until that is removed."""
        done = self._library.bpf_prog_attach(self._program(name), group, ATTACH_TYPES[name], _ALLOW_MULTI)
        if done != 0:
            raise _error(f"attach {name}")

    def attach_to_hook(self, name: str) -> None:
        """Attaches a program to the security hook that it names, until this object is closed."""
        link = self._library.bpf_program__attach_lsm(self._find(name))
        if not link:
            raise _error(f"attach {name}")
        self._links.append(link)

    def attach_to_link(self, name: str, ifindex: int, *, outgoing: bool = False) -> None:
        """Has a program see what comes in at a device of the calling thread's network namespace, or what
        goes out there, until that is removed."""
        program = self._program(name)
        if self._library.bpf_prog_attach(program, ifindex, _TCX_KINDS[outgoing], 0) == 0:
            return
        # Before Linux 6.6. Each queue makes the kernel look through all others.
        hook = _Hook(size=ctypes.sizeof(_Hook), ifindex=ifindex, attach_point=_TC_POINTS[outgoing])
        options = _Options(size=ctypes.sizeof(_Options), program=program)
        if self._library.bpf_tc_hook_create(byref(hook)) != 0:
            raise _error("make a clsact queue")
        if self._library.bpf_tc_attach(byref(hook), byref(options)) != 0:
            raise _error(f"attach {name} to a link")

    def _program(self, name: str) -> int:
        return int(self._library.bpf_program__fd(self._find(name)))

    def _find(self, name: str) -> int:
        if not self._object:
            raise OSError(errno.EBADF, f"{name}: the object is closed")
        program = self._library.bpf_object__find_program_by_name(self._object, name.encode())
        if not program:
            raise _error(f"find program {name}")
        return int(program)


class BpfMap:
    """Keys and values are bytes of the sizes that the object declares. Thread-safe."""

    def __init__(self, library: ctypes.CDLL, fd: int, name: str) -> None:
        self._library, self._name = library, name
        self.fd = fd

    def set(self, key: bytes, value: bytes) -> None:
        """Adds or replaces an entry. OSError with ENOSPC where the map is full, whatever its type."""
        if self._library.bpf_map_update_elem(self.fd, key, value, 0) != 0:
            error = _error(f"write to map {self._name}")
            if error.errno == errno.E2BIG:  # a hash map's word for it
                raise OSError(errno.ENOSPC, f"write to map {self._name}: it is full")
            raise error

    def get(self, key: bytes, num_bytes: int) -> bytes | None:
        """An entry's value, None where there is none."""
        value = ctypes.create_string_buffer(num_bytes)
        return value.raw if self._library.bpf_map_lookup_elem(self.fd, key, value) == 0 else None

    def remove(self, key: bytes) -> None:
        """Removes an entry; nothing there is no error."""
        self._library.bpf_map_delete_elem(self.fd, key)


class RingBuffer:
    """Samples of a ring buffer. `consume` is for one thread at a time."""

    def __init__(self, source: BpfMap, library: ctypes.CDLL, on_sample: Callable[[bytes], None]) -> None:
        def take(context: int | None, data: int, size: int) -> int:
            del context
            on_sample(ctypes.string_at(data, size))
            return 0

        self._library = library
        self._callback = _OnSample(take)  # must live as long as the buffer
        self._buffer = library.ring_buffer__new(source.fd, self._callback, None, None)
        if not self._buffer:
            raise _error("open the log")

    def fileno(self) -> int:
        """Readable when there are samples."""
        return int(self._library.ring_buffer__epoll_fd(self._buffer))

    def consume(self) -> None:
        """Hands all samples that there are to `on_sample`. Does not block."""
        if self._buffer:
            self._library.ring_buffer__consume(self._buffer)

    def close(self) -> None:
        """Idempotent."""
        if self._buffer:
            self._library.ring_buffer__free(self._buffer)
        self._buffer = None


def _error(doing: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{doing}: {os.strerror(number)}")
