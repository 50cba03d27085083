"""How many sandboxes one owner holds, and what each costs while the others live.

`python -m bench.sandbox_density --json [--quick] [--max COUNT]`. Sandboxes of substrate `container` under
preset `agent`, which lets them reach one gateway: a server in a network namespace made for this. They pile up
in steps and none ends before the last step. At each step, one after the other:

- `create_ms`: the last creates of the step, by one client;
- `exec_ms`: /usr/bin/true through the SDK in sandboxes drawn at random;
- `mib_each`: what sandboxes have cost since the first was made, over their number: proportional memory of
  their processes and growth of this one's (smaps), and growth of what the kernel holds (slabs, reclaimable
  ones too; page tables, kernel stacks, per-CPU memory, tmpfs). What runs beside it spoils the kernel's part;
- `fds_each`, `threads_each`: of this process, over their number;
- `gateway`: a sandbox drawn at random reaches it, and another address is refused.

It ends at `--max` sandboxes (by default 2,500; 60 with `--quick`), at the first create that fails, when the
machine has less than 3 GiB of memory left, or after half an hour, and `ended` says which; then it ends all,
as it does at Ctrl-C. The value is the p50 of exec at the last step; its target, and those of the rest, are
for 2,500 sandboxes, so a smaller run does not say whether they are met. Needs root and `make setup`.
"""

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import common, density_world, footprint
from protocol.errors import DockyardError
from sandbox import Policy, Sandbox, cgroups
from sandbox.audit import check_integrity
from sandbox.host_tree import remove_tree
from sandbox.places import default_state_dir, default_toolkit
from sandbox.policy.presets import preset

WANTED, FIRST = 2_500, 100
TARGETS = {"exec_p50_ms": 2.0, "exec_p99_ms": 25.0, "mib_each": 1.2, "fds_each": 4.0, "create_ratio": 1.3}
LEAST_FREE_MIB, MAX_MINUTES = 3 << 10, 30.0
STEPS, QUICK_STEPS = (FIRST, 250, 500, 1_000, 1_500, 2_000, WANTED), (20, 60)
EXECS, CREATES, ENDERS = 400, 50, 4


@dataclass(frozen=True, slots=True)
class Verdict(common.Comparison):
    """Less is better. `rest`: whether the others of TARGETS are met."""

    rest: bool

    @property
    def met(self) -> bool:
        return self.ratio <= self.target and self.rest


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sandbox_density",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="the same measurement, smaller: two minutes")
    parser.add_argument("--max", type=int, metavar="COUNT", help="sandboxes at most")
    chosen = parser.parse_args(arguments)
    most = chosen.max or (QUICK_STEPS[-1] if chosen.quick else WANTED)
    surroundings = common.Surroundings(("pydantic",))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = run(steps_to(most, QUICK_STEPS if chosen.quick else STEPS))
    report = common.report(verdict(found["steps"]), surroundings, found)
    if found["steps"][-1]["live"] < WANTED:
        report["met"] = None
    return common.finish(report, common.Options(chosen.json, chosen.quick))


def steps_to(most: int, steps: Sequence[int]) -> list[int]:
    """Those below `most`, more of the last distance, and `most`."""
    found = [each for each in steps if each < most]
    distance = steps[-1] - steps[-2]
    while found and found[-1] >= steps[-1] and found[-1] + distance < most:
        found.append(found[-1] + distance)
    return [*found, most]


def run(steps: Sequence[int]) -> dict[str, Any]:
    """Every step, and what ended it. Leaves nothing behind."""
    state_dir = Path(tempfile.mkdtemp(prefix="dockyard-density-"))
    try:
        with ExitStack() as last:
            egress, gateway = last.enter_context(density_world.gateway(state_dir))
            policy = preset("agent", gateway=gateway)
            pile = Pile(lambda: _create(policy, egress, state_dir), state_dir)
            last.callback(pile.end)
            found: list[dict[str, Any]] = []
            ended = ""
            for count in steps:
                ended = pile.grow(count)
                found.append(measure(pile, gateway))
                common.progress(str(found[-1]))
                if ended:
                    break
            ended = ended or f"as many as were asked for: {steps[-1]}"
            started_s, live = time.monotonic(), len(pile.boxes)
            pile.end()
            kill_ms = (time.monotonic() - started_s) * 1e3 / max(1, live)
        leftovers = [f"{each.kind} {each.name}" for each in check_integrity(state_dir).leftovers]
    finally:
        remove_tree(state_dir)
    return {"ended": ended, "kill_ms_each": round(kill_ms, 1), "leftovers": leftovers, "steps": found}


class Pile:
    """Sandboxes that live. One thread, but for `end`."""

    def __init__(self, make: Callable[[], Sandbox], state_dir: Path) -> None:
        self._make, self._state_dir = make, state_dir
        make().kill()  # what only the first one pays for
        self.boxes: list[Sandbox] = []
        self.create_ms: list[float] = []
        self.before = footprint.take(())
        self._give_up_s = time.monotonic() + MAX_MINUTES * 60

    def grow(self, count: int) -> str:
        """Makes more until there are `count`; why there are fewer, if there are."""
        self.create_ms = []
        while len(self.boxes) < count:
            if (free := footprint.available_mib()) < LEAST_FREE_MIB:
                return f"memory: {free} MiB are left on this machine"
            if time.monotonic() > self._give_up_s:
                return f"time: {MAX_MINUTES:g} minutes are over"
            started_s = time.perf_counter()
            try:
                box = self._make()
            except DockyardError as error:
                return f"a create failed: {error.message}"
            self.create_ms.append((time.perf_counter() - started_s) * 1e3)
            self.boxes.append(box)
        return ""

    def groups(self) -> list[Path]:
        """Their cgroups that limit processes: launcher, init and all else are in them."""
        roots = [each.root for each in cgroups.find_hierarchies() if "pids" in each.controllers]
        return cgroups.list_groups(roots, cgroups.state_key(self._state_dir))

    def end(self) -> None:
        """Ends all. Idempotent."""
        with ThreadPoolExecutor(ENDERS) as pool:
            list(pool.map(Sandbox.kill, self.boxes))
        self.boxes.clear()


def measure(pile: Pile, gateway: str) -> dict[str, Any]:
    """One step's figures; empty ones where there is no sandbox."""
    live = len(pile.boxes)
    if not live:
        return {"live": 0}
    chance = random.Random(live)
    times = sorted(_exec_ms(chance.choice(pile.boxes)) for _ in range(EXECS))
    used = footprint.take(pile.groups()).minus(pile.before)
    return {
        "live": live,
        "create_p50_ms": round(median(pile.create_ms[-CREATES:] or [0.0]), 2),
        "exec_p50_ms": round(median(times), 2),
        "exec_p99_ms": round(times[len(times) * 99 // 100], 2),
        "exec_max_ms": round(times[-1], 2),
        "mib_each": round(used.mib / live, 3),
        "mib_parts": {name: round(value / live, 3) for name, value in used.parts.items()},
        "fds_each": round(used.fds / live, 2),
        "threads_each": round(used.threads / live, 2),
        "gateway": density_world.reach(chance.choice(pile.boxes), gateway),
    }


def verdict(steps: Sequence[dict[str, Any]]) -> Verdict:
    """Of the last step; creates against those at the first."""
    first, last = steps[0], steps[-1]
    ratio = last.get("create_p50_ms", 0.0) / (first.get("create_p50_ms") or 1.0)
    found = {**last, "create_ratio": ratio}
    last["create_ratio"] = round(ratio, 2)
    rest = all(found.get(name, float("inf")) <= target for name, target in TARGETS.items())
    return Verdict(
        name="sandbox_density",
        unit=f"ms to run /usr/bin/true beside {last['live']} live sandboxes",
        value=last.get("exec_p50_ms", float("inf")),
        peer="target",
        peer_value=TARGETS["exec_p50_ms"],
        target=1.0,
        rest=rest and last.get("gateway") == density_world.AS_IT_SHOULD,
    )


def _create(policy: Policy, egress: density_world.Egress, state_dir: Path) -> Sandbox:
    return Sandbox.create(
        substrate="container", policy=policy, egress=egress, state_dir=state_dir, lifetime_s=4 * 3600.0,
        toolkit=default_toolkit(default_state_dir()), cpu=1.0, memory_mb=512, pids=128, disk_mb=64,
    )  # fmt: skip


def _exec_ms(box: Sandbox) -> float:
    started_s = time.perf_counter()
    result = box.commands.run(["/usr/bin/true"])
    taken_ms = (time.perf_counter() - started_s) * 1e3
    if not result.ok:
        raise SystemExit(f"sandbox_density: a command ended with {result.reason}: {result.stderr}")
    return taken_ms


if __name__ == "__main__":
    common.run(main)
