"""The grading script in a plain child process: the subject is the script and its verdict, not the walls."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from evals.examples import VisibleExample
from evals.grading import Execution, grade_hidden, judge, visible_tests
from evals.problems import Problem
from protocol.errors import DockyardError, MissingCapability

PROBLEM = Problem(
    "t/0", "f", "def f(x):\n", "    return x * x\n", "def check(candidate):\n    assert candidate(3) == 9\n"
)
RIGHT = "def f(x):\n    return x * x\n"


@pytest.fixture
def execute(tmp_path):
    async def run(files, script):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        stdout, stderr = await child.communicate()
        return Execution(child.returncode, stdout.decode(), stderr.decode(), "exit", 1.0)

    return run


def verdict_on(program, execute):
    return asyncio.run(grade_hidden(program, PROBLEM, execute))


def test_a_right_program_passes(execute):
    grade = verdict_on(RIGHT, execute)
    assert (grade.verdict, grade.detail, grade.duration_ms) == ("passed", "", 1.0)


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("def f(x):\n    return x\n", "AssertionError"),
        ("def f(x):\n    return y\n", "NameError: name 'y' is not defined"),
        ("def g(x):\n    return x\n", "NameError"),
        ("import sys\nsys.exit(0)\n", "ended before its tests did"),
        ("import os\nos._exit(0)\n", "ended before its tests did"),
        ("def f(x):\n    raise SystemExit(0)\n", "ended before its tests did"),
        (
            "import os\ndef f(x):\n    print('all tests passed')\n    os._exit(0)\n",
            "ended before its tests did",
        ),
        ("import sys\ndef f(x):\n    sys.exit(3)\n", "exit code 3"),
        ("check = lambda candidate: None\ndef f(x):\n    return 0\n", "AssertionError"),
        ("print(open('grade.py').read())\n", "FileNotFoundError"),  # the tests cannot be read from disk
    ],
)
def test_wrong_programs_fail(program, detail, execute):
    grade = verdict_on(program, execute)
    assert grade.verdict == "failed"
    assert detail in grade.detail


def test_output_of_the_program_does_not_hide_the_token(execute):
    assert verdict_on(f"print('x', end='')\n{RIGHT}", execute).verdict == "passed"


def test_a_dataclass_in_the_program_works(execute):
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(x):\n    return P(x).x ** 2\n"
    )
    assert verdict_on(program, execute).verdict == "passed"


def test_memory_error_is_told_from_a_wrong_answer(execute):
    assert verdict_on("def f(x):\n    raise MemoryError\n", execute).verdict == "oom"


def test_visible_examples_become_tests_of_the_hidden_form(execute):
    right = [VisibleExample("f(2)", "4"), VisibleExample("f(0)", "0")]
    wrong = [*right, VisibleExample("f(1)", "7")]
    grade, other = (
        asyncio.run(grade_hidden(RIGHT, replace(PROBLEM, test=visible_tests(examples)), execute))
        for examples in (right, wrong)
    )
    assert grade.verdict == "passed"
    assert (other.verdict, other.detail) == ("failed", "AssertionError: f(1)")


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("timeout", "timeout"),
        ("oom", "oom"),
        ("output_limit", "failed"),
        ("signal", "failed"),
        ("lost", "infrastructure"),
    ],
)
def test_reasons_of_the_sandbox(reason, verdict):
    assert judge(Execution(None, "", "", reason, 5.0), begin="b", end="e").verdict == verdict


@pytest.mark.parametrize(
    ("exit_code", "stdout", "verdict"),
    [
        (0, "b\n\ne\n", "passed"),
        (0, "b\na e\n", "failed"),  # the token within a line is the program's doing
        (1, "b\n\ne\n", "failed"),
        (0, "e\n", "infrastructure"),  # never began
        (127, "", "infrastructure"),  # no interpreter
    ],
)
def test_tokens_decide(exit_code, stdout, verdict):
    assert judge(Execution(exit_code, stdout, "", "exit", 1.0), begin="b", end="e").verdict == verdict


def test_a_failing_sandbox_is_not_the_models_fault():
    async def broken(files, script):
        raise DockyardError("edge lost")

    grade = verdict_on(RIGHT, broken)
    assert (grade.verdict, grade.detail) == ("infrastructure", "edge lost")


def test_a_host_that_can_make_no_sandbox_stops_the_run():
    async def incapable(files, script):
        raise MissingCapability("no user namespaces")

    with pytest.raises(MissingCapability):
        verdict_on(RIGHT, incapable)


def test_tracebacks_written_into_each_other_still_name_the_error() -> None:
    start = "Traceback (most recent call last):\n  File 'a', line 1\n"
    grade = judge(Execution(1, "b", f"{start}OSError: no\n{start}", "exit", 1.0), begin="b", end="e")
    assert (grade.verdict, grade.detail) == ("failed", "OSError: no")
