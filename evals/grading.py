"""The verdict on a program: its tests run in a sandbox that has seen nothing else.

The script prints two tokens that are drawn for this one grading: one before the program, so that a sandbox
without an interpreter is not taken for a wrong program, and one after the last test. A program that leaves
early, with whatever exit code, has not printed the second. Program and tests share one interpreter, as
HumanEval defines them: a program written to search its frames for the token could still forge a pass.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from evals.examples import VisibleExample
from evals.problems import Problem
from evals.verdicts import Verdict
from protocol.errors import DockyardError, InvalidInput, MissingCapability

SCRIPT_NAME = "grade.py"
MAX_DETAIL_CHARS = 300

# Runs inside the sandbox. The script removes itself first: the tests are not to be read by what they test.
_SCRIPT = """\
import os, sys, types

def grade(program, tests, subject, begin, end):
    os.unlink(__file__)
    # What the verdict needs is bound before the program runs: it may replace every builtin and module.
    run, write, flush, find = exec, os.write, sys.stdout.flush, dict.__getitem__
    hidden = compile(tests, "tests.py", "exec")
    write(1, begin)
    module = sys.modules["program"] = types.ModuleType("program")
    names = module.__dict__
    run(compile(program, "program.py", "exec"), names)
    checks = dict(names)  # the tests call helpers of the prompt, and cannot be replaced by the program
    run(hidden, checks)
    if subject not in names:
        raise NameError(f"the program defines no {{subject}}")
    find(checks, "check")(find(names, subject))
    flush()
    write(1, end)

grade({program!r}, {tests!r}, {subject!r}, {begin!r}, {end!r})
"""


@dataclass(frozen=True, slots=True)
class Execution:
    """What a command left behind. `reason` is that of `sandbox.CommandResult`: "exit", "signal", …"""

    exit_code: int | None
    stdout: str
    stderr: str
    reason: str
    duration_ms: float
    shortfalls: tuple[str, ...] = ()  # of its sandbox: what this host could not give it


# Runs a Python script, given as files by name and the name to start, in a sandbox made for this one call.
# Raises a `DockyardError` where the sandbox fails. Cancelled, it leaves nothing behind.
Execute = Callable[[Mapping[str, bytes], str], Awaitable[Execution]]


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict and its evidence in a line."""

    verdict: Verdict
    detail: str
    duration_ms: float | None = None  # of the tests; None where none ran
    shortfalls: tuple[str, ...] = ()  # of the sandbox that they ran in


async def grade_hidden(program: str, problem: Problem, execute: Execute) -> Grade:
    """Run the hidden tests against a program. Faults of the program and of the sandbox are verdicts.

    Raises `InvalidInput` and `MissingCapability` where no sandbox can be made at all. May be cancelled; waits
    as long as the sandbox's time limit.
    """
    begin, end = secrets.token_hex(16), secrets.token_hex(16)
    script = _SCRIPT.format(
        program=program, tests=problem.test, subject=problem.entry_point,
        begin=f"{begin}\n".encode(), end=f"\n{end}\n".encode(),
    )  # fmt: skip
    try:
        execution = await execute({SCRIPT_NAME: script.encode()}, SCRIPT_NAME)
    except (InvalidInput, MissingCapability):
        raise  # no attempt can be graded on this host or with this configuration
    except DockyardError as error:
        return Grade("infrastructure", _short(str(error)))
    return judge(execution, begin=begin, end=end)


def visible_tests(examples: Sequence[VisibleExample]) -> str:
    """Examples as the source of a `check` function, in the form of the hidden tests."""
    return "\n    ".join(["def check(candidate):", "pass", *(example.assertion for example in examples)])


def judge(execution: Execution, *, begin: str, end: str) -> Grade:
    """The verdict on what a grading script left; it prints `begin` and, after the last test, `end`. Pure."""
    verdict, detail = _by_reason(execution) or _by_output(execution, begin, end)
    return Grade(verdict, _short(detail), execution.duration_ms, execution.shortfalls)


def _by_reason(execution: Execution) -> tuple[Verdict, str] | None:
    match execution.reason:
        case "exit":
            return None
        case "timeout":
            return "timeout", "the tests did not end in their time"
        case "oom":
            return "oom", "the sandbox's memory limit"
        case "output_limit":
            return "failed", "printed more than the output limit"
        case "signal":
            return "failed", f"ended by a signal, exit code {execution.exit_code}"
        case other:
            return "infrastructure", f"the sandbox ended: {other}"


def _by_output(execution: Execution, begin: str, end: str) -> tuple[Verdict, str]:
    last_error = _last_error(execution.stderr)
    if not execution.stdout.startswith(begin):
        return "infrastructure", f"the grading script did not start: {last_error or execution.exit_code}"
    if execution.exit_code == 0:
        if end in execution.stdout.splitlines():
            return "passed", ""
        return "failed", "the program ended before its tests did"
    if last_error.startswith("MemoryError"):
        return "oom", "MemoryError"
    return "failed", last_error or f"exit code {execution.exit_code}"


def _last_error(stderr: str) -> str:
    """The last line that names an exception: several processes may write their tracebacks into each other."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if not line[0].isspace() and not line.startswith("Traceback ")]
    return (named or lines or [""])[-1]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DETAIL_CHARS else f"{line[: MAX_DETAIL_CHARS - 1]}…"
