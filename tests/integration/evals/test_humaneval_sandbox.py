"""Grading behind real walls: each program in a sandbox of its own."""

import asyncio

import pytest

from evals.grading import grade_hidden
from evals.humaneval_config import SandboxSettings
from evals.problems import Problem, load_problems
from evals.sandboxes import fresh_sandbox
from protocol.errors import MissingCapability
from sandbox.audit import check_integrity
from sandbox.places import default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit

PROBLEM = Problem("t/0", "f", "def f(x):\n", "", "def check(candidate):\n    assert candidate(3) == 9\n")
RIGHT = "def f(x):\n    return x * x\n"


@pytest.fixture(scope="module")
def toolkit():
    into = default_toolkit(default_state_dir())
    build_toolkit(into)  # nothing to do after set-up
    return into


@pytest.fixture
def grade(toolkit, tmp_path):
    def run(program, problem=PROBLEM, **settings):
        execute = fresh_sandbox(SandboxSettings(**settings), state_dir=tmp_path, toolkit=toolkit)
        return asyncio.run(grade_hidden(program, problem, execute))

    return run


def test_a_right_program_passes(grade):
    result = grade(RIGHT)
    assert (result.verdict, result.detail) == ("passed", "")
    assert result.duration_ms > 0


def test_what_the_sandbox_lacks_is_in_the_grade(grade, monkeypatch):
    monkeypatch.setattr("sandbox.making._profile", lambda rules, state: None)  # as on a host without AppArmor
    assert "apparmor" in grade(RIGHT).shortfalls


@pytest.mark.parametrize("task_id", ["HumanEval/0", "HumanEval/32", "HumanEval/38", "HumanEval/162"])
def test_canonical_solutions_pass(grade, task_id):
    (problem,) = load_problems(task_ids=[task_id])
    assert grade(problem.prompt + problem.canonical_solution, problem).verdict == "passed"


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("def f(x):\n    return x\n", "failed", "AssertionError"),
        ("import os\nos._exit(0)\n", "failed", "ended before its tests did"),
        ("def f(x):\n    while True: pass\n", "timeout", "in their time"),
        ("def f(x):\n    return bytearray(1 << 30)\n", "oom", ""),
        ("def f(x):\n    while True: print('x' * 10000)\n", "failed", "output limit"),
        ("import os\ndef f(x):\n    while True: os.fork()\n", "failed", "BlockingIOError"),
        ("import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "failed", "signal"),
        (
            "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 22), 1)\n",
            "failed",
            "ConnectionRefusedError",  # its loopback is its own, and nobody listens there
        ),
        ("def f(x):\n    open('/usr/lib/x', 'w')\n", "failed", "OSError"),
    ],
)
def test_bad_programs_end_with_their_own_verdict(grade, program, verdict, detail):
    result = grade(program, timeout_s=3.0)
    assert result.verdict == verdict
    assert detail in result.detail


@pytest.mark.parametrize(
    "forgery",
    [
        "import builtins\nbuiltins.compile = lambda *a, **k: compile('def check(c): pass', 'x', 'exec')\n",
        "import builtins\nbuiltins.exec = lambda code, names=None: names.update(check=lambda c: None)\n",
        "import sys, types\nclass M(types.ModuleType):\n    check = property(lambda self: lambda c: None)\n"
        "sys.modules['program'].__class__ = M\n",
    ],
)
def test_replaced_builtins_and_modules_do_not_forge_a_pass(grade, forgery):
    assert grade(f"{forgery}def f(x):\n    return 0\n").verdict == "failed"


def test_a_child_that_stays_behind_does_not_hold_the_verdict(grade):
    program = f"import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n{RIGHT}"
    assert grade(program).verdict == "passed"


def test_a_host_without_a_toolkit_is_told_so(tmp_path):
    execute = fresh_sandbox(SandboxSettings(), state_dir=tmp_path, toolkit=tmp_path / "none")
    with pytest.raises(MissingCapability, match="no toolkit at"):
        asyncio.run(grade_hidden(RIGHT, PROBLEM, execute))


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.5])
def test_a_cancelled_grading_leaves_no_sandbox(toolkit, tmp_path, after_s):
    """Cancelled while the sandbox is made or while the program runs, whichever the host has reached."""
    execute = fresh_sandbox(SandboxSettings(), state_dir=tmp_path, toolkit=toolkit)

    async def cancelled():
        async with asyncio.timeout(after_s):
            await grade_hidden("while True: pass\n", PROBLEM, execute)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    audit = check_integrity(tmp_path)
    assert audit.live == ()
    assert audit.leftovers == ()
