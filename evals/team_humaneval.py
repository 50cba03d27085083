"""A live team on a HumanEval problem: seeds are split among samplers, the first visible success ends it."""

from evals.grading import Execute
from evals.problems import Problem
from evals.sampling import hidden_verifier, sampling_problem
from teams.harness.sampler import SamplerLimits, run_sampler
from teams.harness.task import RunOptions, TeamOutcome, TeamTask
from teams.team import ModelFactory
from teams.workspace import SandboxFactory, Tree


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

    `sandboxes` makes the agents' boxes, `execute` the graders'. Raises `InvalidInput` for a problem without
    visible examples, `VerifierError`, and what ended the lead. May be cancelled; nothing is left then.
    """
    task = TeamTask(
        name=problem.task_id,
        instruction=problem.question,
        workspace=Tree({}),
        sandboxes=sandboxes,
        verify=hidden_verifier(problem, execute),
    )
    return await run_sampler(sampling_problem(problem), task, models, limits=limits, options=options)
