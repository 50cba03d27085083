"""What the egress policy costs: connecting and sending with it and without it, and attaching it.

`python -m bench.egress --json [--quick]`. Two processes in two namespaces with a veth each, to servers in a
third: one in a guarded cgroup behind the fence, under a policy of some hundred entries, the other as the
kernel has it. They take turns, and the order of each turn changes, so that what else the machine does meets
both. The value is TCP connections a second, by the median of all; the peer is the same without policy.

- `tcp_connect`, `tcp_connect_6` (version 6), `udp_connect` (the hook alone, no packet), `udp_send`:
  microseconds, median of all;
- `attach`: every program to a fresh cgroup; `connect`: that, the rules, a link from stock and the resolver;
- `link`: making a link, which the stock does ahead of need; `replace`: another policy for a live sandbox;
- `denial`: from before a refused connect to its record in this process.

Needs root and `make setup`. Everything happens in namespaces made for it.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeVar

from bench import common
from bench.attack_cases import plain_link
from bench.demo_overhead import quantiles
from sandbox import cgroups
from sandbox.egress import links, namespaces
from sandbox.egress.fence import Fence
from sandbox.egress.rules import compile_table, rules_of
from sandbox.egress.service import Egress
from sandbox.egress.trunk import Trunk
from sandbox.policy import Network
from sandbox.refusals import Attempt

T = TypeVar("T")

HOST, HOST_6, REFUSED, TCP_PORT, UDP_PORT = "198.51.100.7", "2001:db8::7", "198.51.100.8", 8000, 5000
MAX_COST, MAX_ATTACH_MS = 1.05, 2.0
KINDS = ("tcp_connect", "tcp_connect_6", "udp_connect", "udp_send")
MOST_DENIALS = 250  # the kernel's programs record 256 in a tenth of a second, and count the rest
_LOG_PATIENCE_S = 10.0

_SERVER = f"""
import selectors, socket
tcp = socket.create_server(("::", {TCP_PORT}), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("{HOST}", {UDP_PORT}))
print("ready", flush=True)
both = selectors.DefaultSelector()
both.register(tcp, 1), both.register(udp, 1)
while True:
    for key, _ in both.select():
        tcp.accept()[0].close() if key.fileobj is tcp else udp.recv(64)
"""
# Joins a cgroup, then reads "kind count" lines and prints nanoseconds each took.
_CLIENT = f"""
import json, socket, struct, sys, time
open(sys.argv[1], "w").write("0")
now, linger = time.perf_counter_ns, struct.pack("ii", 1, 0)
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def connect(family, host):
    with socket.socket(family) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        start = now(); client.connect((host, {TCP_PORT})); return now() - start
def tcp_connect(): return connect(socket.AF_INET, "{HOST}")
def tcp_connect_6(): return connect(socket.AF_INET6, "{HOST_6}")
def udp_connect():
    start = now(); one.connect(("{HOST}", {UDP_PORT})); return now() - start
def udp_send():
    start = now(); one.sendto(b"x", ("{HOST}", {UDP_PORT})); return now() - start
def denied():
    with socket.socket() as client:
        start = time.monotonic_ns(); client.connect_ex(("{REFUSED}", {TCP_PORT})); return start
for line in sys.stdin:
    kind, count = line.split()
    print(json.dumps([globals()[kind]() for _ in range(int(count))]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Cost(common.Comparison):
    """The comparison of connections, and what attaching took beside it."""

    attach_p50_ms: float

    @property
    def met(self) -> bool:
        """Both."""
        return self.ratio >= self.target and self.attach_p50_ms <= MAX_ATTACH_MS


class Client:
    """A process in a namespace and a cgroup that does what it is told and times it."""

    def __init__(self, namespace: int, group: Path) -> None:
        self._process = namespaces.run_in(namespace, lambda: _python(_CLIENT, str(group / "cgroup.procs")))

    def times(self, kind: str, count: int) -> list[int]:
        """Nanoseconds of each."""
        written, read = _pipes(self._process)
        written.write(f"{kind} {count}\n")
        written.flush()
        return json.loads(read.readline())

    def close(self) -> None:
        """Ends it."""
        for pipe in _pipes(self._process):
            pipe.close()
        self._process.wait()


class Place:
    """An uplink with servers, and cgroups and clients in namespaces of their own."""

    def __init__(self, on_exit: ExitStack) -> None:
        self._on_exit = on_exit
        self.state = Path(on_exit.enter_context(tempfile.TemporaryDirectory()))
        self.key = cgroups.state_key(self.state)
        self.uplink = namespaces.new_namespace()
        on_exit.callback(os.close, self.uplink)
        own = (f"address add {each} dev lo" for each in (f"{HOST}/32", f"{HOST_6}/128", f"{REFUSED}/32"))
        namespaces.configure(self.uplink, ["link set lo up", *own])
        server = namespaces.run_in(self.uplink, lambda: _python(_SERVER))
        on_exit.callback(_end, server)
        _pipes(server)[1].readline()
        self.root = next(each.root for each in cgroups.find_hierarchies() if each.version == 2)
        on_exit.callback(cgroups.remove_empty_parents, [self.root], self.key)
        self._num_groups = 0

    @contextmanager
    def group(self) -> Generator[Path]:
        """A fresh cgroup."""
        self._num_groups += 1
        path = self.root / cgroups.TOP / self.key / f"bench-{self._num_groups}"
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            cgroups.remove_group(path)

    def client(self, namespace: int, group: Path) -> Client:
        """Ends with the place."""
        client = Client(namespace, group)
        self._on_exit.callback(client.close)
        return client

    def plain_client(self) -> Client:
        """Without any program of ours."""
        inner = namespaces.new_namespace()
        self._on_exit.callback(os.close, inner)  # and its veth goes with it
        plain_link.make(self.uplink, inner)
        return self.client(inner, self._on_exit.enter_context(self.group()))

    def guarded_client(self, egress: Egress) -> Client:
        """Under the policy."""
        group = self._on_exit.enter_context(self.group())
        connection = egress.connect("bench", group, policy())
        self._on_exit.callback(egress.disconnect, connection)
        return self.client(connection.link.namespace, group)


def policy(num_others: int = 100) -> Network:
    """What the clients do, among other things."""
    others = [{"to": f"203.0.113.{each}", "ports": [443]} for each in range(num_others)]
    own = [{"to": each, "ports": [TCP_PORT]} for each in (HOST, HOST_6)]
    own += [{"to": HOST, "ports": [UDP_PORT], "protocol": "udp"}]
    return Network.model_validate({"destinations": own + others})


def compare(guarded: Client, plain: Client, rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Median microseconds of each kind, with the policy and without, and the one over the other."""
    found: dict[str, tuple[list[int], list[int]]] = {kind: ([], []) for kind in KINDS}
    for turn in range(rounds):
        for kind, (with_policy, without) in found.items():
            pairs = [(guarded, with_policy), (plain, without)]
            for client, times in pairs if turn % 2 else reversed(pairs):
                times.extend(client.times(kind, count))
    return {
        kind: {
            "with_us": median(with_policy) / 1e3,
            "without_us": median(without) / 1e3,
            "ratio": round(median(with_policy) / median(without), 4),
            "samples": len(without),
        }
        for kind, (with_policy, without) in found.items()
    }


def time_parts(place: Place, egress: Egress, count: int) -> dict[str, list[float]]:
    """Milliseconds of attaching, connecting, replacing, disconnecting, and of making a link."""
    found: dict[str, list[float]] = {
        name: [] for name in ("attach", "connect", "replace", "disconnect", "link")
    }
    with closing(Trunk(place.uplink, place.key, egress.fence.lead)) as trunk:
        for _ in range(count):
            with place.group() as group:
                sandbox = _timed(found["attach"], lambda group=group: egress.fence.guard(group))
                egress.fence.forget(sandbox)
            egress.fill()
            with place.group() as group:
                connection = _timed(
                    found["connect"], lambda group=group: egress.connect("bench", group, Network())
                )
                _timed(found["replace"], lambda each=connection: each.replace(policy(), 1))
                _timed(found["disconnect"], lambda each=connection: egress.disconnect(each))
            egress.fill()
            link = _timed(found["link"], lambda: links.make_link(trunk, egress.fence.watch_link))
            links.remove_link(trunk, link)
    return found


def time_denials(place: Place, count: int) -> list[float]:
    """Milliseconds from before a refused connect to its record here."""
    seen_ns: list[int] = []

    def note(sandbox: int, attempt: Attempt) -> None:
        del sandbox, attempt
        seen_ns.append(time.monotonic_ns())

    fence = Fence([], note)
    end = threading.Event()

    def watch() -> None:
        while not end.is_set():
            select.select([fence.log_fileno()], [], [], 0.1)
            fence.drain()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with place.group() as group:
            fence.replace(fence.guard(group), compile_table(rules_of(Network())))
            client = Client(place.uplink, group)
            began_ns = [client.times("denied", 1)[0] for _ in range(count)]
            client.close()
        give_up_s = time.monotonic() + _LOG_PATIENCE_S
        while len(seen_ns) < count:
            fence.drain()
            if time.monotonic() > give_up_s:
                raise SystemExit(f"egress: {len(seen_ns)} of {count} refusals were recorded")
    finally:
        end.set()
        watcher.join()
        fence.close()
    return [(seen - began) / 1e6 for seen, began in zip(seen_ns, began_ns, strict=True)]


def bench(quick: bool) -> dict[str, Any]:
    """Everything that is measured."""
    with ExitStack() as on_exit:
        place = Place(on_exit)
        uplink = Path(f"/proc/self/fd/{place.uplink}")
        egress = Egress(place.state, uplink=uplink, nameserver=(HOST, 53), num_spare=1)
        on_exit.callback(egress.close)
        common.progress("connecting and sending, by turns")
        guarded, plain = place.guarded_client(egress), place.plain_client()
        costs = compare(guarded, plain, *((4, 200) if quick else (40, 500)))
        common.progress("attaching")
        parts = time_parts(place, egress, 10 if quick else 100)
        denials = time_denials(place, 50 if quick else MOST_DENIALS)
    return {
        "costs": costs,
        **{name: _described(times) for name, times in {**parts, "denial": denials}.items()},
    }


def main(arguments: Sequence[str]) -> int:
    options = common.parse("egress", __doc__, arguments)
    surroundings = common.Surroundings(["pydantic"])
    found = bench(options.quick)
    tcp = found["costs"]["tcp_connect"]
    cost = Cost(
        "egress", "TCP connections a second", 1e6 / tcp["with_us"], "without policy", 1e6 / tcp["without_us"],
        1 / MAX_COST, found["attach"]["p50_ms"],
    )  # fmt: skip
    return common.finish(
        common.report(cost, surroundings, {"quick": options.quick, "max_attach_ms": MAX_ATTACH_MS, **found}),
        options,
    )


def _described(times_ms: list[float]) -> dict[str, float]:
    found = quantiles(times_ms)
    return {
        "p50_ms": round(found.p50_ms, 3),
        "p99_ms": round(found.p99_ms, 3),
        "min_ms": round(min(times_ms), 3),
        "samples": found.samples,
    }


def _timed(into: list[float], work: Callable[[], T]) -> T:
    start_s = time.perf_counter()
    result = work()
    into.append((time.perf_counter() - start_s) * 1e3)
    return result


def _python(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    for pipe in _pipes(process):
        pipe.close()
    process.wait()


if __name__ == "__main__":
    common.run(main)
