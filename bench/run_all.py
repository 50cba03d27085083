"""Every bench, each in a process of its own, and their results as one table.

`python -m bench.run_all [--quick] [--only NAME …]`, or `--stored` for the page of the results that are kept
in `bench/results`, the newest of each bench, without running any. A bench is a module of this folder that can
be started by itself. Its last line of output is its JSON object; progress goes to stderr and is passed on.
The table goes to `bench/RESULTS.md`, beside the conditions that it was measured under. Exit code 1 if a
target was missed or a bench failed; a verdict that noise made void is neither.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from bench import common

FOLDER = Path(__file__).parent
RESULTS, STORED = FOLDER / "RESULTS.md", FOLDER / "results"  # a file a bench and day: 2026-11-30-NAME.json
_KEPT = "The newest in `bench/results` of each bench; this page: `python -m bench.run_all --stored`."
PATIENCE_S = 60.0  # for a bench that is told to end
LIMIT_S = {True: 300.0, False: 7_200.0}  # by `quick`, whose two minutes a busy machine may stretch


@dataclass(frozen=True, slots=True)
class Outcome:
    """One bench's object, or why there is none."""

    name: str
    value: Mapping[str, Any] | None
    failure: str = ""

    @property
    def is_missed(self) -> bool:
        return self.value is None or self.value.get("met") is False


def bench_names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Modules that can be started by themselves, in alphabetical order, without this one."""
    found = sorted(path for path in folder.glob("*.py") if path.stem != Path(__file__).stem)
    return tuple(path.stem for path in found if '\nif __name__ == "__main__":' in path.read_text())


def run(name: str, quick: bool) -> Outcome:
    """Runs one bench to its end. Blocks for minutes."""
    command = [sys.executable, "-m", f"bench.{name}", "--json", *(["--quick"] if quick else [])]
    limit_s = LIMIT_S[quick]
    with subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True) as bench:
        try:
            output, _ = bench.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(bench)
            return Outcome(name, None, f"not done after {limit_s:g} s")
        except BaseException:
            _end(bench)
            raise
    return read(name, output, bench.returncode)


def _end(bench: "subprocess.Popen[str]") -> None:
    """With time to remove what it has made."""
    bench.terminate()
    try:
        bench.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        bench.kill()


def read(name: str, output: str, exit_code: int) -> Outcome:
    """The object on the last line of a bench's output."""
    last = output.strip().rpartition("\n")[2]
    try:
        return Outcome(name, msgspec.json.decode(last, type=dict[str, Any]))
    except msgspec.DecodeError:
        return Outcome(name, None, f"exit code {exit_code}, no JSON object on the last line")


def stored(folder: Path = STORED) -> list[Outcome]:
    """The newest result that is kept of each bench, in alphabetical order."""
    newest = {path.stem[len("2026-11-30-") :]: path for path in sorted(folder.glob("????-??-??-*.json"))}
    return [read(name, newest[name].read_text(), 0) for name in sorted(newest)]


def said_of(quick: bool, at: datetime) -> str:
    """When and how the results of a page were measured."""
    form = "quick form (`make bench`)" if quick else "full form (`python -m bench.run_all`)"
    return f"Measured {at:%Y-%m-%d %H:%M} UTC, {form}."


def table(outcomes: Sequence[Outcome], measured: str) -> str:
    """The page: a line a bench. `measured` says when and how."""
    lines = [
        "# Results",
        "",
        f"{measured} `docs/benchmarks.md` says what each measures.",
        "",
        "| bench | value | unit | target | peer | ratio | met |",
        "|---|---|---|---|---|---|---|",
        *(_row(outcome) for outcome in outcomes),
        "",
        *_conditions(outcomes),
    ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    value = outcome.value
    if value is None:
        return f"| {outcome.name} | | {_cell(outcome.failure)} | | | | failed |"
    peer = f"{value['peer']}: {_number(value.get('peer_value'))}" if value.get("peer") else ""
    cells = (
        outcome.name,
        _number(value.get("value")),
        value.get("unit", ""),
        _number(value.get("target")),
        peer,
        _number(value.get("ratio")),
        _met(value),
    )
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _met(value: Mapping[str, Any]) -> str:
    met = value.get("met")
    if met is None:
        return "void: noisy" if value.get("noisy") else "not judged"
    return "yes" if met else "**no**"


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.4g}"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _conditions(outcomes: Sequence[Outcome]) -> list[str]:
    """What each bench says of the machine that it ran on."""
    return [
        f"- {outcome.name}: " + ", ".join(f"{key} {_number(of)}" for key, of in outcome.value["env"].items())
        for outcome in outcomes
        if outcome.value is not None and isinstance(outcome.value.get("env"), dict)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run_all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each bench for at most two minutes")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=bench_names(), help="these benches alone"
    )
    parser.add_argument("--stored", action="store_true", help="run nothing, write the page of what is kept")
    options = parser.parse_args(arguments)
    if options.stored:
        RESULTS.write_text(table(stored(), _KEPT))
        return 0
    outcomes: list[Outcome] = []
    for name in options.only or bench_names():
        print(f"· {name}", file=sys.stderr, flush=True)
        outcomes.append(run(name, options.quick))
        print(_row(outcomes[-1]), flush=True)
    page = table(outcomes, said_of(options.quick, datetime.now(UTC)))
    if options.only is None:  # a part is no result of the whole
        RESULTS.write_text(page)
    return 1 if any(outcome.is_missed for outcome in outcomes) else 0


if __name__ == "__main__":
    common.run(main)
