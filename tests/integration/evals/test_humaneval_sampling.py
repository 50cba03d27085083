"""What a team of samplers gets of a problem, run for real in child processes."""

import asyncio
import subprocess
import sys

import pytest

from evals.grading import Execution
from evals.problems import Problem, load_problems
from evals.sampling import VerifierError, hidden_verifier, sampling_problem
from protocol.errors import DockyardError, InvalidInput
from teams.harness.sampler import SOLUTION_PATH
from teams.workspace import Diff

PROBLEM = load_problems(limit=1)[0]
RIGHT = PROBLEM.prompt + PROBLEM.canonical_solution


def passes_visible(program, tmp_path):
    script = tmp_path / "visible.py"
    script.write_text(sampling_problem(PROBLEM).examples(program))
    return subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, check=False).returncode


def test_the_question_and_the_extraction():
    problem = sampling_problem(PROBLEM)
    assert problem.name == "HumanEval/0"
    assert problem.messages[0].content == PROBLEM.question
    assert "def has_close_elements" in problem.extract(f"```python\n{RIGHT}```")
    assert problem.extract("no idea") == ""


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        (RIGHT, True),
        ("def has_close_elements(numbers, threshold):\n    return True\n", False),
        ("import sys\nsys.exit(0)\n", False),
        ("def other():\n    pass\n", False),
        ("def broken(:\n", False),
    ],
)
def test_visible_examples_decide_by_exit_code(program, passes, tmp_path):
    assert (passes_visible(program, tmp_path) == 0) is passes


def test_hidden_tests_are_not_in_what_samplers_see():
    script = sampling_problem(PROBLEM).examples("pass")
    assert not any(line.strip() in script for line in PROBLEM.test.splitlines() if "assert" in line)


def test_a_problem_without_examples_is_refused():
    bare = Problem("t/0", "f", 'def f(x):\n    """Do it."""\n', "", "")
    with pytest.raises(InvalidInput, match="t/0: its prompt shows no example"):
        sampling_problem(bare)


def test_the_verifier_judges_what_is_handed_in(tmp_path):
    async def execute(files, script):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        stdout, stderr = await child.communicate()
        return Execution(child.returncode, stdout.decode(), stderr.decode(), "exit", 1.0)

    verify = hidden_verifier(PROBLEM, execute)
    right = asyncio.run(verify(Diff({SOLUTION_PATH: RIGHT.encode()})))
    assert (right.solved, right.passed, right.failed) == (True, 1, 0)
    wrong = asyncio.run(verify(Diff({SOLUTION_PATH: b"def has_close_elements(a, b): return 1\n"})))
    assert (wrong.solved, wrong.detail) == (False, "failed: AssertionError")
    assert not asyncio.run(verify(Diff())).solved


def test_a_sandbox_that_fails_is_no_verdict():
    async def broken(files, script):
        raise DockyardError("edge lost")

    with pytest.raises(VerifierError, match="HumanEval/0: edge lost"):
        asyncio.run(hidden_verifier(PROBLEM, broken)(Diff({SOLUTION_PATH: b""})))
