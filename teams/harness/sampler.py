"""The sampling harness: a lead splits seeds among teammates; the first program that passes ends the search.

It needs no model that can follow instructions, only one that writes a program now and then. Which programs
to ask for, how to read them and which examples are visible comes in as a `SamplingProblem`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import DockyardError
from teams.digests import digest
from teams.harness.task import RunOptions, TeamOutcome, TeamTask, run_program
from teams.member import Ending, Member, Program, Turn
from teams.model_client import ChatMessage, Completion
from teams.team import ModelFactory
from teams.tools import clip
from teams.workspace import CommandResult


@dataclass(frozen=True, slots=True)
class SamplingProblem:
    """A programming problem as a sampler sees it. The callables are pure."""

    name: str
    messages: tuple[ChatMessage, ...]  # what the model is asked
    extract: Callable[[str], str]  # the program in an answer; "" where there is none
    examples: Callable[[str], str]  # a Python script that exits with 0 when a program passes what is visible


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """How much is drawn."""

    teammates: int = 3
    samples: int = 4  # a teammate
    first_seed: int = 1
    temperature: float = 0.8
    max_tokens: int = 320
    run_timeout_s: float = 10.0


class NothingDrawnError(DockyardError):
    """Every sampler failed before its first program: says nothing about the model."""


SOLUTION_PATH = "solution.py"  # where the chosen program lies in the lead's workspace
_CHECK_PATH = "visible_examples.py"


async def run_sampler(
    problem: SamplingProblem,
    task: TeamTask,
    models: ModelFactory,
    *,
    limits: SamplerLimits | None = None,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Runs a live team of samplers on a problem.

    The verdict is that of `task.verify` on a diff that holds the program at `SOLUTION_PATH`. Raises the
    `DockyardError` that ended the lead. May be cancelled; nothing is left then.
    """
    program = _lead(problem, limits or SamplerLimits())
    result, events = await run_program(task, program, models, options or RunOptions())
    return TeamOutcome(task.name, replay=False, result=result, events=events)


def _lead(problem: SamplingProblem, limits: SamplerLimits) -> Program:
    async def lead(member: Member) -> Ending:
        drawn: list[int] = []  # the seeds whose programs came
        seeds = range(limits.first_seed, limits.first_seed + limits.teammates * limits.samples)
        names = [f"sampler-{index + 1}" for index in range(limits.teammates)]
        for index, name in enumerate(names):
            share = seeds[index :: limits.teammates]  # interleaved, so that low seeds come first everywhere
            task = f"draw seeds {', '.join(map(str, share))}"
            member.spawn(name, _sampler(problem, share, limits, drawn), task)
        waited = await member.wait_any(names)
        winner = waited.messages[0].sender if waited.messages else None
        for name in names:
            if name != winner:
                member.cancel(name)
        joined = await member.join(names)
        if winner is None:
            failed = [outcome for outcome in joined.outcomes if outcome.state == "failed"]
            if failed and not drawn:
                raise NothingDrawnError(f"no program could be drawn: {failed[0].summary}")
            lost = f"; {failed[0].name} failed: {failed[0].summary}" if failed else ""
            return Ending("gave up", f"none of {len(drawn)} programs passed the visible examples{lost}")
        await member.take(winner)
        return Ending("submit", waited.messages[0].text)

    return lead


def _sampler(
    problem: SamplingProblem, seeds: Sequence[int], limits: SamplerLimits, drawn: list[int]
) -> Program:
    async def sampler(member: Member) -> Ending:
        for number, seed in enumerate(seeds, start=1):
            start_ns = member.recorder.clock.now_ns()
            answer = await member.ask(
                problem.messages, max_tokens=limits.max_tokens, temperature=limits.temperature, seed=seed
            )
            drawn.append(seed)
            result = await _try(member, problem, answer.text, limits.run_timeout_s)
            member.keep_turn(_turn(member, number, answer, result, start_ns))
            if result.exit_code == 0:
                member.send("lead", f"seed {seed} passes the visible examples")
                return Ending("done", f"seed {seed} passes")
        return Ending("gave up", f"{len(seeds)} programs, none passes")

    return sampler


async def _try(member: Member, problem: SamplingProblem, answer: str, timeout_s: float) -> CommandResult:
    program = problem.extract(answer)
    if not program.strip():
        return CommandResult(1, "the answer holds no program")
    await member.write(SOLUTION_PATH, program.encode())
    await member.write(_CHECK_PATH, problem.examples(program).encode())
    return await member.run(f"python3 {_CHECK_PATH}", timeout_s=timeout_s)


def _turn(member: Member, number: int, answer: Completion, result: CommandResult, start_ns: int) -> Turn:
    ended = f"exit {result.exit_code}" if result.reason == "exit" else f"ended: {result.reason}"
    output = f"{ended}\n{result.output}".rstrip()
    return Turn(
        agent=member.name,
        number=number,
        text=answer.text,
        action="sample",
        observation=clip(output),
        output_digest=digest(output),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        start_ns=start_ns,
        end_ns=member.recorder.clock.now_ns(),
    )
