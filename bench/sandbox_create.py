"""From nothing to a program that has run in a sandbox, beside crun, runc and bubblewrap.

`python -m bench.sandbox_create --json [--quick]`. Ours: `Sandbox.create` under the default policy (offline),
and /usr/bin/true through the SDK; then the sandbox is killed, which is not timed. The peers: an overlay of
the same skeleton is mounted and the tool runs /usr/bin/true on it, with the same binds, namespaces, limits
and table of system calls; taking it down is not timed. `crun` gets the table as ours hands it to crun, as
instructions; `crun by names` makes them itself each time. All take turns in changing order, in the same
process, by 1, 2, 8 and 32 clients at once. Milliseconds, p50 and p99. The value is substrate `container`
against `crun run` at one client; less is better. `ratios` has every number of clients, and `met` is all of
them.

`cpu_ms` is the processor time that one sandbox takes of this process and of all that it starts, its end
included: worth more than the clock on a machine that others use. What the kernel does later is not in it.

`networked` is `container` under preset `agent`, which lets it reach one gateway in a network namespace made
for this: a row of its own that is not judged, since no peer has a network policy. Links are made ahead of
need; many clients use the stock up.

The first of each kind makes what all share (the image's skeleton, rules, links) and is not counted.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import common, density_world
from bench.oci_peer import (
    MEMORY_BYTES,
    PIDS,
    TRUE,
    Peer,
    Workshop,
    check_whole,
    peers,
    threads_for_peers,
)
from sandbox import Policy, Sandbox
from sandbox.egress.service import Egress
from sandbox.places import default_state_dir
from sandbox.policy.presets import preset

TARGET = 1.3  # times crun's p50
JUDGED, PEER = "container", "crun"
CLIENTS = (1, 2, 8, 32)


@dataclass(frozen=True, slots=True)
class Size:
    """Sandboxes of each kind: a round is one for each client."""

    rounds: int
    least: int  # sandboxes of each kind and number of clients


FULL = Size(rounds=9, least=60)
QUICK = Size(rounds=5, least=15)


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better, at every number of clients."""

    ratios: Mapping[str, float]  # by clients

    @property
    def met(self) -> bool:
        return all(each <= self.target for each in self.ratios.values())


@dataclass(frozen=True, slots=True)
class Maker:
    """`make` makes a sandbox, runs the program, takes it down; the seconds of the first two."""

    make: Callable[[], float]
    is_peer: bool = False


@dataclass(slots=True)
class Taken:
    """By the sandboxes of one kind and number of clients."""

    seconds: list[float] = field(default_factory=list[float])  # each, to the end of its program
    cpu_s: float = 0.0  # all together, with their ends

    def row(self) -> dict[str, Any]:
        return {**summary(self.seconds), "cpu_ms": round(self.cpu_s / len(self.seconds) * 1e3, 2)}


def main(arguments: Sequence[str]) -> int:
    options = common.parse("sandbox_create", __doc__, arguments)
    surroundings = common.Surroundings(("pydantic",))
    size = QUICK if options.quick else FULL
    with common.temporary_home(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox_create.", dir="/var/tmp"))
        workshop = Workshop(Path(folder))
        stack.callback(workshop.close)
        egress, gateway = stack.enter_context(density_world.gateway(default_state_dir()))
        taken = measure(makers(workshop, egress, gateway), size)
    rows = {
        str(clients): {name: each.row() for name, each in kinds.items()} for clients, kinds in taken.items()
    }
    found = verdict(rows)
    detail = {"size": asdict(size), "ratios": found.ratios, "clients": rows}
    return common.finish(common.report(found, surroundings, detail), options)


def verdict(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Verdict:
    """Of summaries by clients and kind."""
    one = rows["1"]
    return Verdict(
        name="sandbox_create",
        unit="ms to the end of /usr/bin/true",
        value=one[JUDGED]["p50_ms"],
        peer=f"{PEER} run",
        peer_value=one[PEER]["p50_ms"],
        target=TARGET,
        ratios={
            clients: round(kinds[JUDGED]["p50_ms"] / kinds[PEER]["p50_ms"], 3)
            for clients, kinds in rows.items()
        },
    )


def makers(workshop: Workshop, egress: Egress, gateway: str) -> Mapping[str, Maker]:
    """Ours and the peers', by name."""
    ours = {substrate: Maker(partial(_ours, substrate)) for substrate in ("function", "container")}
    policy = preset("agent", gateway=gateway)
    networked = Maker(partial(_ours, JUDGED, policy, egress))
    theirs = {peer.name: Maker(partial(_peer, workshop, peer), is_peer=True) for peer in peers()}
    return {**ours, "networked": networked, **theirs}


def _ours(substrate: str, policy: Policy | None = None, egress: Egress | None = None) -> float:
    start_s = time.perf_counter()
    with Sandbox.create(
        substrate=substrate, policy=policy, egress=egress, memory_mb=MEMORY_BYTES >> 20, pids=PIDS, cpu=2
    ) as box:
        result = box.commands.run([TRUE])
        taken_s = time.perf_counter() - start_s
        if not result.ok:
            raise SystemExit(f"sandbox_create: the program ended with {result.reason}: {result.stderr}")
        check_whole(box)
    return taken_s


def _peer(workshop: Workshop, peer: Peer) -> float:
    bundle = workshop.bundle([TRUE], peer)
    try:
        start_s = time.perf_counter()
        bundle.run(peer)
        return time.perf_counter() - start_s
    finally:
        bundle.remove()


def measure(makers: Mapping[str, Maker], size: Size) -> dict[int, dict[str, Taken]]:
    """By clients and kind. Kinds take turns in rounds, first forwards, then backwards."""
    with ThreadPoolExecutor(1) as ours, threads_for_peers(1) as theirs:
        for maker in makers.values():
            (theirs if maker.is_peer else ours).submit(maker.make).result()
    found: dict[int, dict[str, Taken]] = {}
    for clients in CLIENTS:
        common.progress(f"{clients} clients")
        kinds = found[clients] = {name: Taken() for name in makers}
        each = max(1, -(-size.least // (size.rounds * clients)))
        with ThreadPoolExecutor(clients) as ours, threads_for_peers(clients) as theirs:
            for number in range(size.rounds):
                for name in list(makers)[:: 1 if number % 2 == 0 else -1]:
                    pool = theirs if makers[name].is_peer else ours
                    before_s = _cpu_s()
                    pending = [pool.submit(makers[name].make) for _ in range(clients * each)]
                    kinds[name].seconds += [one.result() for one in pending]
                    kinds[name].cpu_s += _cpu_s() - before_s
    return found


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50_ms": round(median(ordered) * 1e3, 2),
        "p99_ms": round(quantiles(ordered, n=100, method="inclusive")[98] * 1e3, 2),
    }


def _cpu_s() -> float:
    """Of this process so far, and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    common.run(main)
