"""The programs of `probes/` as text, to be run by an interpreter that has nothing of ours."""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path

from bench.attack_cases.model import Probe, Seen
from sandbox import CommandResult

_PROBES = Path(__file__).parent / "probes"
_CONFINED = "confined:"
# Put after each program: words open a door, an OSError or a LookupError is a shut one. A first word with a
# filter's instructions has it put itself under that filter before (struct sock_fprog; PR_SET_NO_NEW_PRIVS and
# PR_SET_SECCOMP of linux/prctl.h).
_END = """
import ctypes as _ctypes, errno as _errno, json as _json, struct as _struct, sys as _sys
if _sys.argv[1].startswith("confined:"):
    _steps = bytes.fromhex(_sys.argv.pop(1).partition(":")[2])
    _room = _ctypes.create_string_buffer(_steps, len(_steps))
    _table = _struct.pack("@HxxxxxxP", len(_steps) // 8, _ctypes.addressof(_room))
    _prctl = _ctypes.CDLL(None, use_errno=True).prctl
    for _words in ((38, 1, 0, 0, 0), (22, 2, _table, 0, 0)):
        if _prctl(*(_each if isinstance(_each, bytes) else _ctypes.c_ulong(_each) for _each in _words)):
            raise RuntimeError(f"not confined: errno {_ctypes.get_errno()}")
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


def command(probe: Probe, confined: bytes = b"") -> list[str]:
    """What runs a probe, with an interpreter that takes nothing from its surroundings. `confined`: under
    these instructions for the kernel's filter of system calls."""
    first = (f"{_CONFINED}{confined.hex()}",) if confined else ()
    return ["python3", "-I", "-c", program(probe.program), *first, probe.function, *probe.arguments]


def judge(result: CommandResult) -> Seen:
    """What a probe's command came to. What says that the door is open is believed however the command ended;
    one that was ended may have found it shut before."""
    found = read_found(result.stdout)
    if found is not None and (found.opened or result.reason == "exit"):
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
