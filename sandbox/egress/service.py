"""Networks of this process's sandboxes: programs, pool of links and resolver, behind one object an uplink."""

import json
import os
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from protocol.clock import Clock, SystemClock
from sandbox import cgroups
from sandbox.egress import links
from sandbox.egress.connection import Connection
from sandbox.egress.fence import Fence, packed_denials
from sandbox.egress.libbpf import load_library
from sandbox.egress.resolver import Resolver
from sandbox.egress.rules import EVERY_PORT, NOWHERE, Ports, Rule, prefix_of
from sandbox.errors import CapacityError, StartError, UnsupportedError, is_shortage
from sandbox.places import EGRESS_OBJECT
from sandbox.policy import Network
from sandbox.pool import Pool
from sandbox.refusals import Attempt

# Of this machine itself, whatever a policy says: ssh, docker and etcd, Ray, Kubernetes.
CONTROL_PORTS: tuple[tuple[int, int], ...] = (
    *((22, 22), (2375, 2380), (6379, 6379), (6443, 6443), (8265, 8265), (10001, 10001), (10250, 10250)),
)
_RESOLVERS_FILE = Path("/etc/resolv.conf")
_HINT = "use network='none', or see `dockyard doctor`"


def check() -> None:
    """Raises UnsupportedError where this host cannot enforce a network policy. Milliseconds; starts nothing.
    What only an attempt can show (a kernel that refuses the programs) `Egress` raises."""
    if os.geteuid() != 0:
        raise UnsupportedError(
            "a sandbox with a network needs root, or the helper that root runs", hint=_HINT
        )
    if not any(each.version == 2 for each in cgroups.find_hierarchies()):
        raise UnsupportedError("a sandbox with a network needs cgroups of version 2", hint=_HINT)
    if not EGRESS_OBJECT.is_file():
        hint = "apt-get install clang libbpf-dev, then `python -m sandbox.egress.build`"
        raise UnsupportedError("the egress programs are not built", hint=hint)
    links.check_tools()
    try:
        load_library()
    except OSError as error:
        raise UnsupportedError(
            f"a sandbox with a network needs libbpf: {error}", hint="apt-get install libbpf1"
        ) from error


class Egress:
    """Thread-safe. Close it when no sandbox needs it any more."""

    def __init__(
        self,
        state_dir: Path,
        *,
        uplink: Path | None = None,
        nameserver: tuple[str, int] | None = None,
        control_ports: Sequence[tuple[int, int]] = CONTROL_PORTS,
        num_spare: int = 2,
        clock: Clock | None = None,
    ) -> None:
        """`uplink` is the network namespace that sandboxes are connected to and that routes what they send,
        by default this process's. `nameserver` (address, port) is asked, from there, for allowed names; by
        default the first of /etc/resolv.conf. `control_ports` of the uplink's own addresses are denied to
        all. `num_spare` links are kept ready. UnsupportedError where this host cannot enforce a policy."""
        check()
        self.clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()  # guards what follows
        self._connections: dict[int, Connection] = {}
        state = cgroups.state_key(state_dir)
        with ExitStack() as on_failure:
            self._uplink = links.open_namespace(uplink)
            on_failure.callback(os.close, self._uplink)
            own = links.run_in(self._uplink, _own_addresses)
            try:
                self.fence = Fence(_denials(own, control_ports), self._on_refusal)
            except OSError as error:
                raise UnsupportedError(
                    f"this kernel does not take the egress programs: {error}", hint=_HINT
                ) from error
            on_failure.callback(self.fence.close)
            self.resolver = Resolver(
                lambda: links.enter(self._uplink), nameserver or first_nameserver(), self.clock
            )
            on_failure.callback(self.resolver.close)
            self.resolver.watch(self.fence.log_fileno(), self.fence.drain)
            on_failure.pop_all()
        self._pool = Pool(
            lambda: links.make_link(self._uplink, state, self.fence.watch_link), self._discard, num_spare
        )
        self._pool.fill()

    def connect(self, name: str, group: Path, network: Network) -> Connection:
        """Guards a sandbox's version 2 cgroup and gives it a link, before anything is in either: first all is
        refused, then the rules are entered, then the link is opened. `disconnect` undoes it. CapacityError or
        StartError when any of it fails; the sandbox must then not start."""
        with ExitStack() as on_failure, refusing("connecting a sandbox to the network", name):
            sandbox = self.fence.guard(group)
            on_failure.callback(self.fence.forget, sandbox)
            link = self._pool.claim()
            on_failure.callback(self._discard, link)
            connection = Connection(self, name, sandbox, link, network)
            with self._lock:
                self._connections[sandbox] = connection
            on_failure.callback(self._forget, sandbox)
            on_failure.callback(connection.close)
            connection.start()
            on_failure.pop_all()
        return connection

    def disconnect(self, connection: Connection) -> None:
        """Refuses everything and removes the link. Idempotent; blocks for some ten milliseconds."""
        connection.close()
        self._forget(connection.id)
        self._discard(connection.link)

    def num_ready(self) -> int:
        """Links in stock."""
        return self._pool.num_ready()

    def num_entries(self) -> int:
        """Entries of rules in the kernel's maps; 0 when no sandbox is connected."""
        return self.fence.num_entries()

    def fill(self) -> None:
        """Blocks until the stock of links is full, or cannot be filled."""
        self._pool.wait()

    def close(self) -> None:
        """Removes the links in stock and lets go of everything. Idempotent."""
        if self._uplink < 0:
            return
        self._pool.close()
        self.resolver.close()
        self.fence.close()
        os.close(self._uplink)
        self._uplink = -1

    def _discard(self, link: links.Link) -> None:
        links.remove_link(self._uplink, link)

    def _forget(self, sandbox: int) -> None:
        with self._lock:
            self._connections.pop(sandbox, None)

    def _on_refusal(self, sandbox: int, attempt: Attempt) -> None:
        with self._lock:
            connection = self._connections.get(sandbox)
        if connection is not None:
            connection.refusals.add(attempt)


_shared: dict[Path, Egress] = {}
_shared_lock = threading.Lock()


def shared_egress(state_dir: Path) -> Egress:
    """The one of this process and state directory, made at the first use: this process's own namespace is the
    uplink. UnsupportedError where this host cannot enforce a policy."""
    with _shared_lock:
        if state_dir not in _shared:
            _shared[state_dir] = Egress(state_dir)
        return _shared[state_dir]


def node_denials() -> bytes:
    """What no policy of any sandbox on this machine overrides, for the helper. StartError without `ip`."""
    return packed_denials(_denials(_own_addresses(), CONTROL_PORTS))


def first_nameserver(file: Path = _RESOLVERS_FILE) -> tuple[str, int] | None:
    """Of a resolv.conf; None where it names none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines)
    return next(((words[1], 53) for words in found if len(words) > 1 and words[0] == "nameserver"), None)


def _own_addresses() -> tuple[str, ...]:
    """Of the namespace that the calling thread is in."""
    done = subprocess.run(["ip", "-json", "address", "show"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartError(f"listing this host's addresses: {done.stderr.strip()}", phase="network")
    return tuple(info["local"] for each in json.loads(done.stdout) for info in each.get("addr_info", ()))


def _denials(own: Sequence[str], control_ports: Sequence[tuple[int, int]]) -> list[Rule]:
    """What no policy overrides: nowhere, other sandboxes, this machine's control plane."""
    nets = (*NOWHERE, str(links.POOL_4), str(links.POOL_6))
    rules = [Rule(prefix_of(net), EVERY_PORT) for net in nets]
    rules += [Rule(prefix_of(address), Ports(*ports, 0)) for address in own for ports in control_ports]
    return rules


@contextmanager
def refusing(doing: str, name: str) -> Generator[None]:
    """An OSError of the block becomes a CapacityError or a StartError of phase `network`."""
    try:
        yield
    except OSError as error:
        words = f"{doing}: {error}"
        if is_shortage(error):
            raise CapacityError(words, hint="end other sandboxes", sandbox_id=name) from error
        raise StartError(words, phase="network", hint=_HINT, sandbox_id=name) from error
