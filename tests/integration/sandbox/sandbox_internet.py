"""A network namespace with servers: what sandboxes under test are connected to instead of the world."""

import os
import selectors
import socket
import struct
import threading
import time
from pathlib import Path

from sandbox.egress import messages, namespaces

HOST, OTHER, PRIVATE, HOST_6 = "198.51.100.7", "198.51.100.8", "10.11.12.13", "2001:db8::7"
OWN, OWN_6 = "198.51.100.6", "2001:db8::6"  # the uplink's own; all others are answered to without being its
METADATA = "169.254.169.254"
NAT64_HOST = "64:ff9b::198.51.100.7"
TCP_PORTS, UDP_PORT = (80, 81, 6379), 5000
_HANG_UP, _END = 1, 1000
NAMESERVER = ("198.51.100.53", 53)
_ADDRESSES = (
    *(f"{each}/32" for each in (HOST, OTHER, PRIVATE, METADATA, NAMESERVER[0])),
    *(f"{each}/128" for each in (HOST_6, NAT64_HOST)),
)


class Internet:
    """TCP servers that greet with `hello` and then echo, a UDP echo, and a nameserver. `names` says what that
    answers, `asked` what it was asked, `heard` what the others have received."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.heard: list[bytes] = []
        self.namespace = namespaces.new_namespace()
        self.path = Path(f"/proc/self/fd/{self.namespace}")
        own = (f"address add {OWN}/32 dev lo", f"address add {OWN_6}/128 dev lo nodad")
        others = (f"route add local {each} dev lo" for each in _ADDRESSES)
        namespaces.configure(self.namespace, ["link set lo up", *own, *others])
        self._selector = selectors.DefaultSelector()
        self._connections: set[socket.socket] = set()
        self._hung_up = threading.Event()
        self._wake = os.eventfd(0)
        self._selector.register(self._wake, selectors.EVENT_READ)
        namespaces.run_in(self.namespace, self._open)
        self._thread = threading.Thread(target=self._serve, name="internet", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """For a new test: what was said, and connections whose other end was cut off."""
        self.names, self.asked, self.heard = {}, [], []
        self._hung_up.clear()
        os.eventfd_write(self._wake, _HANG_UP)
        self._hung_up.wait()

    def devices(self) -> list[str]:
        """Names of all that there are."""
        return sorted(name for _, name in namespaces.run_in(self.namespace, socket.if_nameindex))

    def close(self) -> None:
        os.eventfd_write(self._wake, _END)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self.namespace)

    def _open(self) -> None:
        # The last, for answers from addresses that are not its own.
        for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/ip_nonlocal_bind"):
            Path("/proc/sys/net", setting).write_text("1")
        for port in TCP_PORTS:
            server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            self._selector.register(server, selectors.EVENT_READ, lambda s=server: self._accept(s))
        for address, answer in ((("::", UDP_PORT), self._echo), (NAMESERVER, self._name)):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            one = socket.socket(family, socket.SOCK_DGRAM)
            one.bind(address)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            self._selector.register(one, selectors.EVENT_READ, lambda s=one, a=answer: a(s))

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj != self._wake:
                    if key.fileobj.fileno() >= 0:  # dropped in this very round
                        key.data()
                elif os.eventfd_read(self._wake) == _END:
                    return
                else:
                    for each in list(self._connections):
                        self._drop(each)
                    self._hung_up.set()

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.send(b"hello")
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
            connection.send(data)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
        self.heard.append(data)

    def _echo(self, one: socket.socket) -> None:
        data, asked, _, asker = one.recvmsg(65536, 256)
        self.heard.append(data)
        one.sendmsg([data], asked, 0, asker)  # from the address that was asked

    def _name(self, one: socket.socket) -> None:
        message, asker = one.recvfrom(4096)
        question = messages.read_question(message)
        self.asked.append(question.name)
        if question.name not in self.names:
            one.sendto(messages.write_reply(question, messages.NO_SUCH_NAME), asker)
            return
        kind = socket.AF_INET if question.type == messages.A else socket.AF_INET6
        found = [each for each in self.names[question.name] if (":" in each) == (kind == socket.AF_INET6)]
        records = b""
        for each in found:
            data = socket.inet_pton(kind, each)
            records += b"\xc0\x0c" + struct.pack(">HHIH", question.type, 1, 60, len(data)) + data
        header = struct.pack(">HHHHHH", question.id, 0x8180, 1, len(found), 0, 0)
        one.sendto(header + question.raw + records, asker)


WEB = {"to": HOST, "ports": [80]}
WEB_6 = {"to": "2001:db8::/32", "ports": [80]}
DATAGRAMS = {"to": HOST, "ports": [UDP_PORT], "protocol": "udp"}
EVERY_SERVER = {"to": "198.51.100.0/24", "ports": ["1-65535"]}

# Each line: how, where, and then the greeting or echo, or the error's name.
REACH = """
import errno, socket, struct, sys
def tcp(host, port, how="connect"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = 262 if how == "mptcp" else 0
    with socket.socket(family, socket.SOCK_STREAM, kind) as one:
        one.settimeout(5)
        if how == "fastopen":
            one.settimeout(None)
            one.sendto(b"x", 0x20000000, (host, port))
        else:
            one.connect((host, port))
        return one.recv(5).decode()
def udp(host, port, how="send"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.settimeout(5)
        if how == "connect":
            one.connect((host, port)); one.send(b"datagram")
        else:
            one.sendto(b"datagram", (host, port))
        return one.recv(9).decode()
def make(family, kind, protocol):
    with socket.socket(family, kind, protocol):
        return "made"
def bind(host, port):
    with socket.socket() as one:
        one.bind((host, port))
        return "bound"
for line in sys.argv[1:]:
    try:
        print(eval(line))
    except OSError as error:
        print("late" if isinstance(error, TimeoutError) else errno.errorcode[error.errno])
"""


def attempt(box, *calls):
    """What each of these calls of REACH ended with, and the command's denials."""
    result = box.commands.run(["python3", "-c", REACH, *calls], timeout_s=60)
    assert result.ok, result.stderr
    return result.stdout.split(), result.denials


def wait_until(holds, patience_s=10.0):
    give_up = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < give_up, "it never came"
