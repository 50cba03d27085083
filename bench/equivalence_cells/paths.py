"""The cells: one function a path. Each says by the engine's counters whether its path was really taken."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from bench.equivalence_cells.prompts import Case
from bench.equivalence_cells.subject import (
    GREEDY,
    WARM,
    Answer,
    Answers,
    Found,
    Proof,
    Subject,
    collect,
    gather,
)
from engine import Engine, Request, SamplingParams
from engine.results import StepResult

HOST = {"host_bytes": 1 << 30}
_NO_WINDOWS = {"window_bytes": 0}  # chunks end where windows are kept
_BEFORE = 5  # tokens that a request has given out when it is disturbed
_AT_ONCE = 8  # prompts of three outputs
_MOST_ONE_BY_ONE = 256  # tokens of a prompt that goes in chunks of 1 and 7

Run = Callable[[Subject], Found]


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    run: Run
    applies: Callable[[Subject], bool] = lambda _: True


def monolithic(subject: Subject) -> Found:
    """Each prompt whole and alone, knowing no prefix: a step for it, and one for each further token."""
    engine = subject.engine(tiers=_NO_WINDOWS)
    answers: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
        answers |= collect([engine])
    counts, least = engine.statistics(), len(subject.cases) * GREEDY.max_tokens
    rows = sum(case.length + GREEDY.max_tokens - 1 for case in subject.cases)
    proof = Proof({"steps": (counts.steps, least), "rows": (counts.rows, rows)}, {
        "further_steps": counts.steps - least, "further_rows": counts.rows - rows,
    })  # fmt: skip
    return Found(answers, proof)


def chunks(size: int) -> Run:
    def run(subject: Subject) -> Found:
        engine = subject.engine(token_budget=size, tiers=_NO_WINDOWS)
        answers: Answers = {}
        fit = _in_chunks_of(size, subject)
        for case in fit:
            engine.add(request_of(case))
            answers |= collect([engine])
        least = sum(-(-case.length // size) + GREEDY.max_tokens - 1 for case in fit)
        steps = engine.statistics().steps
        return Found(answers, Proof({"steps": (steps, least)}, {"further_steps": steps - least}))

    return run


def _in_chunks_of(size: int, subject: Subject) -> list[Case]:
    """The cases that so small a budget cuts, and does not take for ever."""
    fit = [case for case in subject.cases if size >= 64 or case.length <= _MOST_ONE_BY_ONE]
    return [case for case in fit if case.length > size]


def neighbours(subject: Subject) -> Found:
    engine = subject.engine(token_budget=96, max_sequences=6)
    for case in subject.cases:
        engine.add(request_of(case))
    most = 0

    def look(result: StepResult) -> None:
        nonlocal most
        most = max(most, len(result.tokens))

    answers = collect([engine], look)
    return Found(answers, Proof({"tokens_in_a_step": (most, 2)}))


def shared_prefixes(subject: Subject) -> Found:
    """All prompts of one tenant, which begin alike: behind what is known of each other, in turn.

    Where windows do not run again, they are kept more often than by default.
    """
    often = {} if subject.replay or not subject.window else {"window_interval": subject.window}
    engine = subject.engine(token_budget=128, tiers=often)
    answers: Answers = {}
    for case in subject.cases:
        engine.add(Request(case.name, case.prompt_ids, GREEDY))
        answers |= collect([engine])
    hits = sum(answer.num_cached > 0 for answer in answers.values())
    return Found(answers, Proof({"hits": (hits, 1)}), may_resume=True)


def prefix_hit(subject: Subject) -> Found:
    """Each prompt again, behind the blocks that the device still has: all of them."""
    engine = subject.engine(kv_cache_bytes=subject.room_for_all())
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    hits, least = sum(answer.num_cached > 0 for answer in answers.values()), subject.long_enough()
    counts = engine.statistics().scheduler
    taken = {"hits": (hits, least)}
    if subject.window:
        taken["exact_resumes"] = (counts.exact_resumes, least)
    return Found(answers, Proof(taken, {"replayed_resumes": counts.replayed_resumes}))


def prefix_replayed(subject: Subject) -> Found:
    """Windows are gone, and the last one runs again: the answer is that of the rule, not of a whole pass."""
    engine = subject.engine(tiers=_NO_WINDOWS, token_budget=64)
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    counts, least = engine.statistics().scheduler, subject.long_enough()
    places = sum(bool(answer.resumed) for answer in answers.values())
    taken = {"replayed_resumes": (counts.replayed_resumes, least), "answers_with_places": (places, least)}
    return Found(answers, Proof(taken, {"exact_resumes": counts.exact_resumes}), may_resume=True)


def host_hit(subject: Subject) -> Found:
    """The device forgets every block; those of host memory come back."""
    engine = subject.engine(tiers=HOST)
    subject.answer([engine], subject.cases, WARM)
    forget_device(engine)
    answers = subject.answer([engine], subject.cases)
    counts, least = engine.statistics(), subject.long_enough()
    return Found(answers, Proof({
        "loaded_blocks": (counts.scheduler.loaded_blocks, least),
        "host_hits": (counts.tiers.blocks.hits, least),
    }))  # fmt: skip


def forget_device(engine: Engine) -> None:
    """Every block that nobody holds is reused."""
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))


def disk_hit(subject: Subject) -> Found:
    """Another engine finds what the first has left on disk. With replay on, windows are not kept there."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = {**HOST, "disk_path": folder}
        first = subject.engine(tiers=tiers)
        subject.answer([first], subject.cases, WARM)
        first.close()
        second = subject.engine(tiers=tiers)
        answers = subject.answer([second], subject.cases)
        counts = second.statistics()
        second.close()
    disk, least = counts.tiers.disk, subject.long_enough()
    assert disk is not None
    proof = Proof(
        {"disk_hits": (disk.hits, least), "loaded_blocks": (counts.scheduler.loaded_blocks, least)},
        {"corrupt": disk.corrupt, "failures": disk.failures},
    )
    return Found(answers, proof, may_resume=subject.window > 0 and subject.replay)


def evicted(subject: Subject) -> Found:
    """In a cache that holds the longest prompt alone, every round drives out the one before."""
    bytes_a_token = subject.model.cache_bytes_per_token()
    room = int(bytes_a_token * (subject.longest + GREEDY.max_tokens + 32))
    engine = subject.engine(kv_cache_bytes=max(room, 1 << 20))
    if room < 1 << 20:  # no engine takes so small a cache: the rest of it is held meanwhile
        engine.pool.allocate(max(engine.pool.num_available - room // int(bytes_a_token * 16), 0))
    answers: Answers = {}
    for sampling in (WARM, GREEDY):
        for case in subject.cases:
            engine.add(request_of(case, sampling))
            while engine.has_work:
                result = engine.step()
                if sampling is GREEDY:
                    gather(result, answers)
    return Found(answers, Proof({"evictions": (engine.statistics().pool.evictions, 1)}))


def preempted(how: str) -> Run:
    """An urgent request takes the one place that there is, and gives it back."""

    def run(subject: Subject) -> Found:
        engine = subject.engine(max_sequences=1, preemption=how, tiers=HOST)
        answers: Answers = {}
        for case in subject.cases:
            engine.add(request_of(case, priority=1))
            while engine.has_work:
                gather(engine.step(), answers)
                if is_disturbed(answers, case) and f"urgent-{case.name}" not in answers:
                    urgent = Request(f"urgent-{case.name}", case.prompt_ids[:16], WARM, cache_salt="urgent")
                    engine.add(urgent)
            engine.check_integrity()
        counts, least = engine.statistics(), len(subject.cases)
        swaps = {"swapped": counts.scheduler.swapped, "swapped_bytes": counts.swapped_bytes}
        taken = {"preemptions": (counts.scheduler.preemptions, least)}
        if how == "swap":
            taken |= {name: (count, least) for name, count in swaps.items()}
        own = {name: answer for name, answer in answers.items() if not name.startswith("urgent-")}
        return Found(own, Proof(taken, {} if how == "swap" else swaps))

    return run


def request_of(case: Case, sampling: SamplingParams = GREEDY, priority: int = 0) -> Request:
    """Its own salt keeps other cases' prefixes away, which cells do not mean to hit."""
    return Request(case.name, case.prompt_ids, sampling, priority, cache_salt=case.name)


def is_disturbed(answers: Answers, case: Case) -> bool:
    """Whether it is so far that something is to happen to it."""
    return case.name in answers and len(answers[case.name].token_ids) == _BEFORE


def choices(subject: Subject) -> Found:
    """Three outputs of one prompt, greedy, and so equal. As many prompts at once as leave room for theirs: an
    output that has to wait for its place copies nothing."""
    engine = subject.engine(max_sequences=3 * _AT_ONCE, kv_cache_bytes=subject.room_for_all())
    answers: Answers = {}
    for start in range(0, len(subject.cases), _AT_ONCE):
        for case in subject.cases[start : start + _AT_ONCE]:
            engine.add(Request(case.name, case.prompt_ids, GREEDY, choices=3, cache_salt=case.name))
        answers |= collect([engine])
    counts = engine.statistics().scheduler
    assert len(answers) == 3 * len(subject.cases), "an output is missing"
    return Found(answers, Proof({
        "forks": (counts.forks, 2 * len(subject.cases)), "copied_blocks": (counts.copied_blocks, 1)
    }))  # fmt: skip


def forked(subject: Subject) -> Found:
    """A fork in the middle of an answer: behind the tokens that both have, each end is the right one."""
    engine = subject.engine()
    answers: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
    while engine.has_work:
        gather(engine.step(), answers)
        for case in subject.cases:
            if is_disturbed(answers, case):
                engine.fork(case.name, f"{case.name}#fork")
    engine.check_integrity()
    for case in subject.cases:
        one, other = answers[case.name], answers[f"{case.name}#fork"]
        answers[f"{case.name}#fork"] = Answer(
            one.token_ids[:_BEFORE] + other.token_ids, one.logprobs[:_BEFORE] + other.logprobs
        )
    counts = engine.statistics().scheduler
    return Found(answers, Proof({
        "forks": (counts.forks, len(subject.cases)), "copied_blocks": (counts.copied_blocks, 1)
    }))  # fmt: skip


def weights_reloaded(subject: Subject) -> Found:
    """The same weights come from their files again, as another version, in the middle of the answers."""
    engine = subject.engine(tiers=HOST, kv_cache_bytes=subject.room_for_all())
    answers: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
    reloads, again = 0, 0
    while engine.has_work:
        gather(engine.step(), answers)
        started = len(answers) == len(subject.cases)
        if not reloads and started and min(len(a.token_ids) for a in answers.values()) >= _BEFORE:
            reloads += 1
            engine.update_weights("2", subject.name)
            going_on = {name for name, found in answers.items() if len(found.token_ids) < GREEDY.max_tokens}
            again = sum(case.length for case in subject.cases if case.name in going_on)
    engine.check_integrity()
    engine.close()
    counts = engine.statistics()
    once = sum(case.length + GREEDY.max_tokens - 1 for case in subject.cases)
    taken = {"reloads": (reloads, 1), "rows_again": (counts.rows - once, max(again, 1))}
    return Found(answers, Proof(taken, {"loaded_blocks": counts.scheduler.loaded_blocks}))


def other_salt(subject: Subject) -> Found:
    """A tenant finds nothing of another's, and the same answers."""
    engine = subject.engine()
    last = subject.cases[-1]
    subject.answer([engine], [last], WARM, salt="one")
    answers = subject.answer([engine], [last], salt="other")
    cached = answers[last.name].num_cached
    own = subject.answer([engine], [last], WARM, salt="one")[last.name].num_cached
    return Found(answers, Proof({"cached_own": (own, 1)}, {"cached_of_another": cached}))


def handed_over(subject: Subject) -> Found:
    engines = [subject.engine(role="prefill"), subject.engine(role="decode")]
    answers = subject.answer(engines, subject.cases)
    rows, least = engines[1].statistics().rows, len(subject.cases) * (GREEDY.max_tokens - 1)
    return Found(answers, Proof({"decode_rows": (rows, least)}, {"computed_again": rows - least}))


def _cut(size: int) -> Callable[[Subject], bool]:
    return lambda subject: bool(_in_chunks_of(size, subject))


CELLS = (
    Cell("monolithic", monolithic),
    *(Cell(f"chunks of {size}", chunks(size), _cut(size)) for size in (1, 7, 64, 512)),
    Cell("batch neighbours", neighbours),
    Cell("shared prefixes", shared_prefixes),
    Cell("prefix hit", prefix_hit),
    Cell("prefix replayed", prefix_replayed, lambda subject: subject.window > 0 and subject.replay),
    Cell("host-tier hit", host_hit),
    Cell("disk-tier hit", disk_hit),
    Cell("after eviction", evicted),
    Cell("preempted by swap", preempted("swap")),
    Cell("preempted by recompute", preempted("recompute")),
    Cell("n>1", choices),
    Cell("forked", forked),
    Cell("weights reloaded", weights_reloaded),
    Cell("another salt", other_salt),
    Cell("handed over", handed_over),
)
