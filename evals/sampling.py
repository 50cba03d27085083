"""HumanEval problems as tasks for a team of samplers (`teams.harness.sampler`).

The samplers see the prompt and its examples. The hidden tests stay here: they judge the program that the
lead hands in, in a sandbox that no agent has touched.
"""

from evals.examples import visible_examples
from evals.extract import extract_program
from evals.grading import Execute, grade_hidden, visible_tests
from evals.problems import Problem
from protocol.errors import DockyardError, InvalidInput
from teams.harness.sampler import SOLUTION_PATH, SamplingProblem
from teams.model_client import ChatMessage
from teams.team import Verdict, Verifier
from teams.workspace import Diff

# Leaves with 0 only where `check` has returned. A program that ends the interpreter by itself can still
# fool it, and then fails the hidden tests.
_VISIBLE_SCRIPT = """\
import sys, types

try:
    module = sys.modules["program"] = types.ModuleType("program")
    exec(compile({program!r}, "program.py", "exec"), module.__dict__)
    exec(compile({tests!r}, "visible.py", "exec"), module.__dict__)
    module.check(getattr(module, {subject!r}))
except SystemExit:
    sys.exit("the program ended the interpreter")
"""


class VerifierError(DockyardError):
    """The hidden tests could not be run: the platform's fault, which says nothing about the program."""


def sampling_problem(problem: Problem) -> SamplingProblem:
    """What the samplers need of a problem. Pure.

    Raises `InvalidInput` for a problem whose prompt shows no example that can be read: its samplers would
    take any program that loads.
    """
    examples = visible_examples(problem)
    if not examples:
        raise InvalidInput(f"{problem.task_id}: its prompt shows no example that can be checked")
    tests = visible_tests(examples)

    def script(program: str) -> str:
        return _VISIBLE_SCRIPT.format(program=program, tests=tests, subject=problem.entry_point)

    return SamplingProblem(
        name=problem.task_id,
        messages=(ChatMessage("user", problem.question),),
        extract=lambda reply: extract_program(reply, problem).program,
        examples=script,
    )


def hidden_verifier(problem: Problem, execute: Execute) -> Verifier:
    """Judges the program that a team hands in: the hidden tests in a fresh sandbox.

    An infrastructure failure is no verdict and raises `VerifierError`.
    """

    async def verify(diff: Diff) -> Verdict:
        program = diff.changed.get(SOLUTION_PATH)
        if program is None:
            return Verdict(solved=False, detail=f"the diff holds no {SOLUTION_PATH}")
        grade = await grade_hidden(program.decode(errors="replace"), problem, execute)
        if grade.verdict == "infrastructure":
            raise VerifierError(f"{problem.task_id}: {grade.detail}")
        solved = grade.verdict == "passed"
        detail = f"{grade.verdict}: {grade.detail}".rstrip(": ")
        return Verdict(solved, detail, int(solved), int(not solved), grade.shortfalls)

    return verify
