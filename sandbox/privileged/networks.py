"""A veth into a user's namespace, whose inside is his: its host end, and programs there and at a cgroup."""

import os
import secrets
import socket
import subprocess
from contextlib import ExitStack, suppress
from ctypes import CDLL, c_char_p, c_int, c_uint32, c_uint64, c_void_p, get_errno
from pathlib import Path

from sandbox.privileged.denials import NUMBERS, POOL_4, POOL_6

_HOST_MAC, _INNER_MAC = "02:64:6b:79:00:01", "02:64:6b:79:00:02"
_AT_GROUP = ("egress", "sock_create", "bind4", "bind6", "connect4", "connect6", "sendmsg4", "sendmsg6")
_KINDS = (1, 2, 8, 9, 10, 11, 14, 15)  # of these, in enum bpf_attach_type
_AT_LINK, _ALLOW_MULTI = 46, 2  # BPF_TCX_INGRESS, of Linux 6.6


class Programs:
    """Over libbpf, with maps for one connection. Attached ones live with their group or link. OSError."""

    def __init__(self, file: str, denials: dict[bytes, bytes]) -> None:
        self._library = library = CDLL("libbpf.so.1", use_errno=True)
        library.bpf_object__open_file.restype = library.bpf_object__find_program_by_name.restype = c_void_p
        library.bpf_map_update_elem.argtypes = (c_int, c_char_p, c_char_p, c_uint64)
        library.bpf_map_delete_elem.argtypes = (c_int, c_char_p)
        self._denials, self._homes = dict[bytes, bytes](), dict[str, bytes]()  # of each link the map's key
        self._object = c_void_p(library.bpf_object__open_file(os.fsencode(file), None))
        with ExitStack() as on_failure:  # upon which whoever asked may ask again, without end
            on_failure.callback(self.close)
            self._check(library.bpf_object__load(self._object) if self._object else -1, "load the programs")
            self.deny(denials)
            on_failure.pop_all()

    def close(self) -> None:
        """Lets go of all that is not attached."""
        self._library.bpf_object__close(self._object)

    def map(self, name: str) -> int:
        """Its descriptor, as long as this object lives."""
        return self._check(self._library.bpf_object__find_map_fd_by_name(self._object, name.encode()), name)

    def deny(self, denials: dict[bytes, bytes]) -> None:
        """These instead of those before, which no entry of the user's overrides."""
        for key, value in denials.items():
            self._write("denied", key, value)
        for key in self._denials.keys() - denials.keys():
            self._library.bpf_map_delete_elem(self.map("denied"), key)
        self._denials = denials

    def guard(self, group: int) -> None:
        """Refuses everything in a cgroup (its folder's descriptor) until rules are there."""
        for name, kind in zip(_AT_GROUP, _KINDS, strict=True):
            self._attach(name, group, kind, _ALLOW_MULTI)

    def make_link(self, namespace: int, draws: int = 8) -> tuple[str, int, int]:
        """Name and ifindex of the host end, and the number of its addresses in the pools. Nothing passes
        until there are rules, and never from other addresses. OSError, also where all drawn are another's."""
        number, name = secrets.choice(NUMBERS), f"dky{secrets.token_hex(5)}"
        version4, version6 = POOL_4[number], POOL_6[number]
        peer = f"peer name eth0 address {_INNER_MAC} netns /proc/self/fd/{namespace}"
        routes = [f"link set {name} addrgenmode none", f"link set {name} up"]
        for address in (version4, version6):
            neighbour = f"neigh replace {address} lladdr {_INNER_MAC} dev {name} nud permanent"
            routes += [f"route add {address} dev {name}", neighbour]
        try:
            _ip([f"link add {name} address {_HOST_MAC} type veth {peer}"], namespace)
            ifindex = socket.if_nametoindex(name)
            with suppress(FileNotFoundError):  # whatever the machine's default is; it may have no version 6
                Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("0")
            home = bytes(10) + b"\xff\xff" + version4.packed + version6.packed + bytes(8)  # no trunk
            self._homes[name] = bytes(c_uint32(ifindex))
            self._write("homes", self._homes[name], home)
            self._attach("wire", ifindex, _AT_LINK, 0)
            _ip(routes)
        except BaseException as error:
            self.remove_links(name)
            if draws > 1 and "File exists" in str(error):  # as `ip` says of another's address
                return self.make_link(namespace, draws - 1)
            raise
        return name, ifindex, number

    def remove_links(self, *names: str) -> None:
        """Both ends of each, and its entry, which nothing else would. Nothing there is no error."""
        for name in names:
            self._library.bpf_map_delete_elem(self.map("homes"), self._homes.pop(name, bytes(4)))
        with suppress(OSError, subprocess.TimeoutExpired):
            _ip([f"link delete {name}" for name in names])

    def _attach(self, name: str, target: int, kind: int, flags: int) -> None:
        found = c_void_p(self._library.bpf_object__find_program_by_name(self._object, name.encode()))
        program = self._library.bpf_program__fd(found)
        self._check(self._library.bpf_prog_attach(program, target, kind, flags), f"attach {name}")

    def _write(self, name: str, key: bytes, value: bytes) -> None:
        self._check(self._library.bpf_map_update_elem(self.map(name), key, value, 0), f"write to {name}")

    def _check(self, done: int, doing: str) -> int:
        if done < 0:
            raise OSError(get_errno(), f"{doing}: {os.strerror(get_errno())}")
        return done


def _ip(lines: list[str], *fds: int) -> None:
    words, text = ["ip", "-force", "-batch", "-"], "\n".join(lines).encode()  # on behind one that fails
    done = subprocess.run(words, input=text, capture_output=True, timeout=20, pass_fds=fds, check=False)
    if done.returncode != 0:
        raise OSError(f"ip: {done.stderr.decode()}")
