"""A command in a sandbox that is there, beside `crun exec`.

`python -m bench.sandbox_exec --json [--quick]`. Ours: `commands.run` through the SDK under the default
policy, in one sandbox of each substrate. The peer: `crun exec` into a container of the same root, limits and
table of calls, its output read through a pipe. Two programs: /usr/bin/true, and one megabyte of output (`head
-c` of /dev/zero). All take turns in changing order. Milliseconds, p50 and p99. The value is /usr/bin/true in
`container`; less is better. Targets: 1.5 ms for it and 3 ms for the megabyte, and faster than the peer.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench import common
from bench.oci_peer import (
    MEMORY_BYTES,
    PIDS,
    TRUE,
    Bundle,
    Peer,
    Workshop,
    check_whole,
    peers,
    threads_for_peers,
)
from bench.sandbox_create import summary
from sandbox import Sandbox

MEGABYTE = 1 << 20
PROGRAMS: dict[str, tuple[tuple[str, ...], int, float]] = {  # words, bytes of output, milliseconds allowed
    "true": ((TRUE,), 0, 1.5),
    "megabyte": (("/usr/bin/head", "-c", str(MEGABYTE), "/dev/zero"), MEGABYTE, 3.0),
}
JUDGED, PEER = "container", "crun"
Run = Callable[[Sequence[str]], int]
"""Runs a program to its end; the bytes that it printed."""
Turn = Callable[[Sequence[str], int, int], list[float]]
"""Runs a program so many times, which prints so many bytes; seconds of each."""


@dataclass(frozen=True, slots=True)
class Size:
    """Commands of each kind: rounds times burst."""

    rounds: int
    burst: int


FULL = Size(rounds=20, burst=25)
QUICK = Size(rounds=8, burst=10)


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better; `value` has a target of its own, in milliseconds, and so has every program."""

    within: bool

    @property
    def met(self) -> bool:
        return self.within and self.ratio <= self.target


def main(arguments: Sequence[str]) -> int:
    options = common.parse("sandbox_exec", __doc__, arguments)
    surroundings = common.Surroundings(("pydantic",))
    size = QUICK if options.quick else FULL
    with common.temporary_home(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox_exec.", dir="/var/tmp"))
        workshop = Workshop(Path(folder))
        stack.callback(workshop.close)
        times = measure(_runners(workshop, stack), size)
    rows = {
        program: {name: summary(each) for name, each in kinds.items()} for program, kinds in times.items()
    }
    within = {name: rows[name][JUDGED]["p50_ms"] <= allowed for name, (_, _, allowed) in PROGRAMS.items()}
    verdict = Verdict(
        name="sandbox_exec",
        unit="ms for /usr/bin/true",
        value=rows["true"][JUDGED]["p50_ms"],
        peer=f"{PEER} exec",
        peer_value=rows["true"][PEER]["p50_ms"],
        target=1.0,
        within=all(within.values()),
    )
    detail = {"size": asdict(size), "within": within, "programs": rows}
    return common.finish(common.report(verdict, surroundings, detail), options)


def _runners(workshop: Workshop, stack: ExitStack) -> Mapping[str, Turn]:
    runners: dict[str, Turn] = {}
    for substrate in ("function", "container"):
        box = Sandbox.create(substrate=substrate, memory_mb=MEMORY_BYTES >> 20, pids=PIDS, cpu=2)
        check_whole(stack.enter_context(box))
        runners[substrate] = partial(_times, partial(_ours, box))
    peer = next((each for each in peers() if each.name == PEER), None)
    if peer is None:
        raise SystemExit(f"sandbox_exec: no {PEER} here; apt-get install {PEER}")
    thread = stack.enter_context(threads_for_peers(1))
    bundle = thread.submit(_begin, workshop, peer).result()
    stack.callback(lambda: thread.submit(_end, bundle, peer).result())

    def take_turn(words: Sequence[str], num_bytes: int, count: int) -> list[float]:
        return thread.submit(_times, partial(_peers, peer, bundle), words, num_bytes, count).result()

    return {**runners, PEER: take_turn}


def _ours(box: Sandbox, words: Sequence[str]) -> int:
    result = box.commands.run(words, output_bytes=2 * MEGABYTE)
    if not result.ok:
        raise SystemExit(f"sandbox_exec: {words[0]} ended with {result.reason}: {result.stderr}")
    return len(result.stdout_bytes)


def _peers(peer: Peer, bundle: Bundle, words: Sequence[str]) -> int:
    command = bundle.command(peer, "exec", bundle.name, *words)
    done = subprocess.run(command, check=True, stdin=bundle.stdio, stdout=subprocess.PIPE)
    return len(done.stdout)


def _begin(workshop: Workshop, peer: Peer) -> Bundle:
    """A container that sleeps, until `_end`."""
    bundle = workshop.bundle(["/usr/bin/sleep", "3600"], peer)
    try:
        bundle.mount()
        detached = bundle.command(peer, "run", "--detach", bundle.name)
        stdio = bundle.stdio
        subprocess.run(detached, check=True, cwd=bundle.place, stdin=stdio, stdout=stdio, stderr=stdio)
    except BaseException:
        _end(bundle, peer)
        raise
    return bundle


def _end(bundle: Bundle, peer: Peer) -> None:
    subprocess.run(bundle.command(peer, "delete", "--force", bundle.name), check=False)
    bundle.remove()


def measure(runners: Mapping[str, Turn], size: Size) -> dict[str, dict[str, list[float]]]:
    """Seconds, by program and kind."""
    found = {program: {name: list[float]() for name in runners} for program in PROGRAMS}
    for program, (words, num_bytes, _) in PROGRAMS.items():
        common.progress(program)
        for number in range(size.rounds + 1):
            for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
                seconds = runners[name](words, num_bytes, size.burst)
                if number > 0:  # the first round warms up
                    found[program][name] += seconds
    return found


def _times(run: Run, words: Sequence[str], num_bytes: int, count: int) -> list[float]:
    return [_timed(run, words, num_bytes) for _ in range(count)]


def _timed(run: Run, words: Sequence[str], num_bytes: int) -> float:
    start_s = time.perf_counter()
    printed = run(words)
    taken_s = time.perf_counter() - start_s
    if printed != num_bytes:
        raise SystemExit(f"sandbox_exec: {words[0]} printed {printed} bytes instead of {num_bytes}")
    return taken_s


if __name__ == "__main__":
    common.run(main)
