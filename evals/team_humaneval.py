"""A live team on a HumanEval problem: seeds are split among samplers, the first visible success ends it."""

from evals.examples import visible_examples
from evals.extract import extract_program
from evals.grading import Execute, grade_hidden, visible_tests
from evals.problems import Problem
from evals.verdicts import consequence
from protocol.errors import DockyardError
from teams.harness.sampler import PASS_MARK, SOLUTION_PATH, SamplerLimits, SamplingProblem, run_sampler
from teams.harness.task import RunOptions, TeamOutcome, TeamTask
from teams.model_client import ChatMessage
from teams.team import ModelFactory, Verdict, Verifier
from teams.workspace import Diff, SandboxFactory, Tree

# Runs in an agent's sandbox, beside the program, which it takes as text: a program may hold anything.
_SCRIPT = """\
namespace = {{"__name__": "solution"}}
exec(compile({program!r}, "solution.py", "exec"), namespace)
exec(compile({tests!r}, "examples.py", "exec"), namespace)
namespace["check"](namespace[{subject!r}])
print({mark!r})
"""


class UngradedError(DockyardError):
    """The hidden tests could not be run: the platform's fault, so the team gets no verdict at all."""


def sampling_problem(problem: Problem) -> SamplingProblem:
    """A HumanEval problem as a sampler takes it. Without readable examples any program that loads passes."""
    tests = visible_tests(visible_examples(problem))

    def examples(program: str) -> str:
        return _SCRIPT.format(program=program, tests=tests, subject=problem.entry_point, mark=PASS_MARK)

    return SamplingProblem(
        name=problem.task_id,
        messages=(ChatMessage("user", problem.question),),
        extract=lambda answer: extract_program(answer, problem).program,
        examples=examples,
    )


async def run(
    problem: Problem,
    *,
    models: ModelFactory,
    sandboxes: SandboxFactory,
    execute: Execute,
    limits: SamplerLimits | None = None,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Runs a lead and its samplers on one problem; the hidden tests run in a sandbox of their own.

    `sandboxes` makes the agents' boxes, `execute` the graders'. Raises what ended the lead, and
    `UngradedError`. May be cancelled; nothing is left then.
    """
    task = TeamTask(
        name=problem.task_id,
        instruction=problem.question,
        workspace=Tree({}),
        sandboxes=sandboxes,
        verify=hidden_tests(problem, execute),
    )
    return await run_sampler(sampling_problem(problem), task, models, limits=limits, options=options)


def hidden_tests(problem: Problem, execute: Execute) -> Verifier:
    """The problem's hidden tests as a team's verifier, on the program that the diff holds."""

    async def verify(diff: Diff) -> Verdict:
        program = diff.changed.get(SOLUTION_PATH)
        if program is None:
            return Verdict(False, "no program passed the visible examples")
        grade = await grade_hidden(program.decode("utf-8", errors="replace"), problem, execute)
        if consequence(grade.verdict).retry:
            raise UngradedError(f"{problem.task_id}: {grade.detail}", hint="run it again")
        passed = grade.verdict == "passed"
        return Verdict(passed, grade.detail or grade.verdict, int(passed), int(not passed))

    return verify
