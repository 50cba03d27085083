"""Known attacks on sandboxes: which doors are shut, by what, and how it is shown that they are doors.

`python -m bench.attacks [--json] [--quick] [--only WORD …] [--user NAME]`. Every case of `bench/attack_cases`
on both substrates, and those that cannot be expressed here with the reason. The value is the number of open
doors and of cases that came out otherwise than expected; the target is none. `--quick` leaves out the long
ones, `--only` runs cases whose name has one of the words. `--user` tries them as an ordinary user whom a
helper serves, which root starts for that; what only root can make or see is "not here". Exit code 1 when a
door is open, a case failed, or something is left over.

A case whose control succeeded is shown: the attempt was a real one. Without a control it counts as not shown.
A substrate whose programs this host does not have is "not here"; one that is here and does not work fails.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.attack_cases import ABSENT, CASES, NOT_HELPED
from bench.attack_cases.arena import Arena
from bench.attack_cases.folders import Folder, remove_left
from bench.attack_cases.model import SUBSTRATES, Case, Substrate
from bench.attack_cases.neighbour import Harmed
from bench.attack_cases.trial import FAULTS, Finding, Outcome, not_tried, run_case
from bench.attack_cases.world import lend
from bench.attack_user import run_as
from bench.common import progress, run
from protocol.errors import DockyardError
from sandbox.audit import check_integrity
from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.places import default_state_dir, default_toolkit
from sandbox.substrates import find_substrate

_COLUMNS = ("case", "substrate", "outcome", "mechanism", "control")


def run_all(cases: Sequence[Case], state_dir: Path, toolkit: Path) -> Iterator[Finding]:
    """One substrate after the other; minutes."""
    for substrate in SUBSTRATES:
        chosen = [case for case in cases if substrate in case.on]
        if not chosen:
            continue
        if lacking := _lacking(substrate):
            yield from (_untried(case, substrate, "not here", lacking) for case in chosen)
            continue
        num_tried = 0
        try:
            with Arena(substrate, state_dir=state_dir, toolkit=toolkit) as arena:
                for case in chosen:
                    progress(f"· {case.key} on {substrate}")
                    yield run_case(case, arena)
                    num_tried += 1
        except (DockyardError, Harmed) as error:  # it is here, and broken
            if num_tried == len(chosen):
                raise
            yield from (_untried(case, substrate, "failed", str(error)) for case in chosen[num_tried:])


def report(findings: Sequence[Finding], leftovers: Sequence[str]) -> dict[str, Any]:
    """The bench's object."""
    faults = sum(each.outcome in FAULTS for each in findings)
    tried = [each for each in findings if each.outcome != "not here"]
    return {
        "name": "attacks",
        "value": faults,
        "unit": f"open doors of {len(tried)}",
        "peer": None,
        "target": 0,
        "met": faults == 0 and not leftovers and bool(tried),
        "shown": sum(each.shown for each in findings),
        "not_shown": sum(not each.shown for each in tried),
        "not_here": len(findings) - len(tried),
        "leftovers": list(leftovers),
        "env": {"system": platform.platform(), "python": platform.python_version(), "uid": os.geteuid()},
        "cases": [asdict(each) for each in findings],
    }


def table(findings: Sequence[Finding]) -> str:
    """For people: a line a case and substrate."""
    rows = [_COLUMNS, *(tuple(str(getattr(each, name)) for name in _COLUMNS) for each in findings)]
    rows = [(*row[:3], row[3][:56], row[4]) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]))
        for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="without the long cases: two minutes")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these")
    parser.add_argument("--user", metavar="NAME", help="as that ordinary user, whom root's helper serves")
    parser.add_argument("--lent-world", metavar="FILE", type=Path, help=argparse.SUPPRESS)  # by --user
    options = parser.parse_args(arguments)
    remove_left()
    if options.user is not None:
        flags = [name for name in ("json", "quick") if getattr(options, name)]
        only = ["--only", *options.only] if options.only else []
        try:
            return run_as(options.user, [*(f"--{name}" for name in flags), *only])
        except (InvalidArgument, UnsupportedError) as error:
            parser.error(str(error))
    if options.lent_world is not None:
        lend(options.lent_world)
    words = options.only or [""]
    chosen = [
        case
        for case in CASES
        if any(word in case.key for word in words) and not (options.quick and case.soak)
    ]
    toolkit = default_toolkit(default_state_dir())
    with _state_dir(is_lent=options.lent_world is not None) as state_dir:
        findings = list(run_all(chosen, state_dir, toolkit))
        leftovers = [f"{each.kind} {each.name}" for each in check_integrity(state_dir).leftovers]
    if not options.only:
        findings += [not_tried(each) for each in (*ABSENT, *(NOT_HELPED if os.geteuid() != 0 else ()))]
    found = report(findings, leftovers)
    summary = {name: found[name] for name in ("value", "shown", "not_shown", "not_here", "leftovers")}
    sys.stdout.write(json.dumps(found) + "\n" if options.json else f"{table(findings)}\n\n{summary}\n")
    return 0 if found["met"] else 1


@contextmanager
def _state_dir(*, is_lent: bool) -> Generator[Path]:
    """A new one for the block. In a lent world the default one, in which a helper looks for its user's, and
    which is not this bench's to remove: `run_as` made it, unless it is somebody's own."""
    if is_lent:
        yield default_state_dir()
        return
    folder = Folder()
    try:
        yield folder.path
    finally:
        folder.remove()


def _lacking(substrate: Substrate) -> str:
    """What this host, as `dockyard doctor` says too, does not have of what a substrate needs."""
    try:
        find_substrate(substrate).check(privileged=os.geteuid() == 0, runtime=None)
    except UnsupportedError as error:
        return str(error)
    return ""


def _untried(case: Case, substrate: Substrate, outcome: Outcome, reason: str) -> Finding:
    control = "no control: not tried"
    return Finding(case.key, case.title, substrate, outcome, reason, case.mechanism, control, shown=False)


if __name__ == "__main__":
    run(main)
