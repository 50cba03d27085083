"""From nothing to a program that has run in a sandbox, beside crun, runc and bubblewrap.

`python -m bench.sandbox_create --json [--quick]`. Ours: `Sandbox.create` under the default policy (offline),
and /usr/bin/true through the SDK; then the sandbox is killed, which is not timed. The peers: an overlay of
the same skeleton is mounted and the tool runs /usr/bin/true on it, with the same binds, namespaces, limits
and table of system calls; taking it down is not timed. All take turns in changing order, in the same process,
by 1, 2, 8 and 32 clients at once. Milliseconds, p50 and p99. The value is substrate `container` against `crun
run` at one client; less is better.

The first of ours makes the image's skeleton and is not counted. A networked create is a row of its own, where
this host can make one.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import common
from bench.oci_peer import MEMORY_BYTES, PIDS, TRUE, Peer, Workshop, enter_own_mounts, peers
from sandbox import Sandbox

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
    """Less is better."""

    @property
    def met(self) -> bool:
        return self.ratio <= self.target


Maker = Callable[[], float]
"""Makes a sandbox, runs the program, takes it down; the seconds of the first two."""


def main(arguments: Sequence[str]) -> int:
    options = common.parse("sandbox_create", __doc__, arguments)
    surroundings = common.Surroundings(("pydantic",))
    enter_own_mounts()
    with tempfile.TemporaryDirectory(prefix="sandbox_create.", dir="/var/tmp") as folder:
        workshop = Workshop(Path(folder))
        try:
            times = measure(makers(workshop), QUICK if options.quick else FULL)
        finally:
            workshop.close()
    rows = {
        str(clients): {name: summary(each) for name, each in kinds.items()}
        for clients, kinds in times.items()
    }
    one = rows["1"]
    verdict = Verdict(
        name="sandbox_create",
        unit="ms to the end of /usr/bin/true",
        value=one[JUDGED]["p50_ms"],
        peer=f"{PEER} run",
        peer_value=one[PEER]["p50_ms"],
        target=TARGET,
    )
    detail = {"size": asdict(QUICK if options.quick else FULL), "clients": rows}
    return common.finish(common.report(verdict, surroundings, detail), options)


def makers(workshop: Workshop) -> Mapping[str, Maker]:
    """Ours and the peers', by name."""
    ours = {substrate: partial(_ours, substrate) for substrate in ("function", "container")}
    return {**ours, **{peer.name: partial(_peer, workshop, peer) for peer in peers()}}


def _ours(substrate: str) -> float:
    start_s = time.perf_counter()
    with Sandbox.create(substrate=substrate, memory_mb=MEMORY_BYTES >> 20, pids=PIDS, cpu=2) as box:
        result = box.commands.run([TRUE])
        taken_s = time.perf_counter() - start_s
        if not result.ok:
            raise SystemExit(f"sandbox_create: the program ended with {result.reason}: {result.stderr}")
    return taken_s


def _peer(workshop: Workshop, peer: Peer) -> float:
    bundle = workshop.bundle([TRUE])
    try:
        start_s = time.perf_counter()
        bundle.run(peer)
        return time.perf_counter() - start_s
    finally:
        bundle.remove()


def measure(makers: Mapping[str, Maker], size: Size) -> dict[int, dict[str, list[float]]]:
    """Seconds, by clients and kind. Kinds take turns in rounds, first forwards, then backwards."""
    for make in makers.values():
        make()
    found: dict[int, dict[str, list[float]]] = {}
    for clients in CLIENTS:
        common.progress(f"{clients} clients")
        kinds = found[clients] = {name: [] for name in makers}
        each = max(1, -(-size.least // (size.rounds * clients)))
        with ThreadPoolExecutor(clients) as pool:
            for number in range(size.rounds):
                for name in list(makers)[:: 1 if number % 2 == 0 else -1]:
                    pending = [pool.submit(makers[name]) for _ in range(clients * each)]
                    kinds[name] += [one.result() for one in pending]
    return found


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50_ms": round(median(ordered) * 1e3, 2),
        "p99_ms": round(quantiles(ordered, n=100, method="inclusive")[98] * 1e3, 2),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
