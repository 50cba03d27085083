"""The programs of `probes/` as text, to be run by an interpreter that has nothing of ours."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path

from bench.attack_cases.model import Probe, Seen
from sandbox import CommandResult

_PROBES = Path(__file__).parent / "probes"
# Put after each program: words open a door, an OSError or a LookupError is a shut one.
_END = """
import errno as _errno, json as _json, sys as _sys
try:
    _found = {"opened": True, "said": globals()[_sys.argv[1]](*_sys.argv[2:])}
except OSError as _error:
    _found = {"opened": False, "said": _errno.errorcode.get(_error.errno, str(_error))}
except LookupError as _error:
    _found = {"opened": False, "said": str(_error.args[0])}
print(_json.dumps(_found), flush=True)
"""


@cache
def program(name: str) -> str:
    """A program's text with its end."""
    return (_PROBES / f"{name}.py").read_text() + _END


def command(probe: Probe) -> list[str]:
    """What runs a probe, with an interpreter that takes nothing from its surroundings."""
    return ["python3", "-I", "-c", program(probe.program), probe.function, *probe.arguments]


def judge(result: CommandResult) -> Seen:
    """What a probe's command came to. One that was ended may have come to its end before it noticed."""
    found = read_found(result.stdout)
    if found is not None and result.reason == "exit":
        return found
    if result.reason == "exit":
        return Seen(False, f"exit {result.exit_code}: {result.stderr[-300:]}")
    name = f"{result.reason} {(result.exit_code or 0) - 128}" if result.reason == "signal" else result.reason
    return Seen(False, name)


def read_found(output: str) -> Seen | None:
    """What a program's end has printed; None where it did not come to."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            return Seen(found["opened"], str(found["said"]))
    return None
