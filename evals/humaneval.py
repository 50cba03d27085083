"""HumanEval, run: sample programs from a model, grade each in a sandbox of its own, and count.

One attempt is `reply -> program -> grade`, each stage on record before the next starts; a run that was
stopped goes on where it was.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from evals.extract import extract_program
from evals.grading import Execute, Grade, grade_hidden
from evals.humaneval_config import RESUMABLE_FIELDS, HumanEvalConfig
from evals.humaneval_result import HumanEvalResult, summarise
from evals.problems import Problem, load_problems
from evals.store import Store, Trial, Turn
from evals.verdicts import Verdict, consequence
from protocol.errors import DockyardError, InvalidInput
from teams.model_client import (
    ChatMessage,
    Completion,
    HttpModelClient,
    ModelClient,
    ModelError,
    ModelRefusedError,
)

RUN_KIND = "humaneval"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after an attempt has got its verdict."""

    done: int
    total: int
    passed: int
    task_id: str
    attempt: int
    verdict: Verdict


async def run_humaneval(
    config: HumanEvalConfig,
    store: Store,
    execute: Execute,
    *,
    model: ModelClient | None = None,
    api_key: str | None = None,
    run_id: str | None = None,
    on_start: Callable[[str], None] = lambda run_id: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> HumanEvalResult:
    """Run or, with `run_id`, resume an evaluation. Returns when every attempt has a verdict.

    `execute` runs a program in a fresh sandbox (`evals.sandboxes.fresh_sandbox`). `model` overrides the
    endpoint of the config; `api_key` is kept out of the config, so that it is never stored, and defaults to
    one that tells the gateway the run. `on_start` is told the run's id, `on_progress` each verdict; both are
    called in the event loop and must not block.

    Raises `InvalidInput` for an unknown run or one of another configuration, and what `load_problems` and
    `execute` raise. A failing endpoint is no error: its attempts are recorded as infrastructure failures,
    which a resume tries again. What the endpoint refuses (a temperature that it does not take, a prompt that
    is too long) is recorded as refused, with its reason, and is not tried again. Cancelled, it
    ends its requests and sandboxes and marks the run interrupted.
    """
    problems = load_problems(limit=config.limit, task_ids=config.task_ids)
    run_id = store.start_run(RUN_KIND, config.model_dump(mode="json")) if run_id is None else run_id
    _reopen(store, run_id, config)
    on_start(run_id)
    try:
        async with AsyncExitStack() as stack:
            client = model or await stack.enter_async_context(
                HttpModelClient(
                    config.base_url,
                    model=config.model,
                    api_key=api_key or f"dk-{run_id}.humaneval",
                    timeout_s=config.request_timeout_s,
                )
            )
            total = len(problems) * config.attempts
            runner = _Runner(
                config, store, run_id, execute=execute, model=client, on_progress=on_progress, total=total
            )
            await _run_all(runner, store, run_id, problems, config.attempts)
    except BaseException:
        store.end_run(run_id, "interrupted")
        raise
    store.end_run(run_id, "finished")
    return summarise(run_id, config, problems, store.trials(run_id))


async def _run_all(
    runner: "_Runner", store: Store, run_id: str, problems: Sequence[Problem], attempts: int
) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            # Attempt by attempt over all problems: a run that is stopped has covered them evenly.
            for attempt in range(attempts):
                for problem in problems:
                    trial = store.plan_trial(run_id, problem.task_id, attempt)
                    group.create_task(runner.attempt(trial, problem))
    except BaseExceptionGroup as group:
        raise _cause(group) from group


def sampling_seed(seed: int, task_id: str, attempt: int) -> int:
    """The seed of one attempt: a function of these three alone, so that no subset or order changes it."""
    digest = hashlib.sha256(f"{seed}/{task_id}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: every endpoint takes them


class _Runner:
    """The attempts of one run. All methods belong to one event loop."""

    def __init__(
        self,
        config: HumanEvalConfig,
        store: Store,
        run_id: str,
        *,
        execute: Execute,
        model: ModelClient,
        on_progress: Callable[[Progress], None],
        total: int,
    ) -> None:
        self._config = config
        self._store, self._run_id = store, run_id
        self._shortfalls = frozenset[str]()  # on record
        self._execute = execute
        self._model = model
        self._on_progress = on_progress
        self._total = total
        self._done = 0
        self._passed = 0
        self._generating = asyncio.Semaphore(config.generation_concurrency)
        self._grading = asyncio.Semaphore(config.grading_concurrency)

    async def attempt(self, trial: Trial, problem: Problem) -> None:
        """Bring one trial to its verdict, unless it has one that counts."""
        verdict = trial.verdict
        if verdict is None or consequence(verdict).retry:
            verdict = await self._settle(trial, problem)
        self._done += 1
        self._passed += verdict == "passed"
        self._on_progress(
            Progress(self._done, self._total, self._passed, trial.task_id, trial.attempt, verdict)
        )

    async def _settle(self, trial: Trial, problem: Problem) -> Verdict:
        program, grade = await self._try(trial, problem)
        for _ in range(self._config.infrastructure_retries):
            if not consequence(grade.verdict).retry:
                break
            await asyncio.sleep(self._config.retry_delay_s)
            program, grade = await self._try(trial, problem)
        self._store.record_verdict(
            trial.id, grade.verdict, detail=grade.detail, program=program, grading_ms=grade.duration_ms
        )
        return grade.verdict

    async def _try(self, trial: Trial, problem: Problem) -> tuple[str, Grade]:
        """The program, "" where there is none, and the grade."""
        try:
            reply = await self._reply(trial, problem)
        except ModelRefusedError as error:
            return "", Grade("refused", str(error))
        except ModelError as error:
            return "", Grade("infrastructure", str(error))
        extraction = extract_program(reply, problem)
        if extraction.fault is not None:
            return "", Grade(extraction.fault, extraction.detail)
        async with self._grading:
            grade = await grade_hidden(extraction.program, problem, self._execute)
        if new := frozenset(grade.shortfalls) - self._shortfalls:
            self._store.note_shortfalls(self._run_id, new)
            self._shortfalls |= new
        return extraction.program, grade

    async def _reply(self, trial: Trial, problem: Problem) -> str:
        """The reply on record, where an earlier try got that far, or a new one."""
        turns = self._store.turns(trial.id)
        if turns:
            return turns[-1].reply
        seed = sampling_seed(self._config.seed, trial.task_id, trial.attempt)
        async with self._generating:
            completion = await self._model.complete(
                [ChatMessage("user", problem.question)],
                max_tokens=self._config.max_tokens,
                temperature=self._config.temperature,
                seed=seed,
            )
        self._store.record_turn(trial.id, _turn(completion, seed))
        return completion.text


def _turn(completion: Completion, seed: int) -> Turn:
    timings_ms: dict[str, float] = {}
    for phase in completion.timeline:
        timings_ms[phase.kind] = timings_ms.get(phase.kind, 0.0) + (phase.end_ns - phase.start_ns) / 1e6
    return Turn(
        request_id=completion.request_id,
        config={"seed": seed},
        reply=completion.text,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        timings_ms=timings_ms,
    )


def _reopen(store: Store, run_id: str, config: HumanEvalConfig) -> None:
    """Mark a run as running. Raises `InvalidInput` where its attempts would not be like those on record."""
    run = store.run(run_id)
    if run.kind != RUN_KIND:
        raise InvalidInput(f"run_id: {run_id} is a run of {run.kind}, not of {RUN_KIND}")
    for name, value in config.model_dump(mode="json").items():
        if name not in RESUMABLE_FIELDS and run.config.get(name) != value:
            raise InvalidInput(
                f"{name}: run {run_id} was started with {run.config.get(name)!r}, not with {value!r}",
                hint="resume with the same value, or start a new run",
            )
    store.end_run(run_id, "running")


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first of ours in the group, or the group itself."""
    ours = failures.subgroup(DockyardError)
    while isinstance(ours, BaseExceptionGroup):
        ours = ours.exceptions[0]
    return ours or failures
