"""The cells: one function a path. Each says by the engine's counters whether every prompt really took it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench.equivalence_cells.prefixes import (
    begun_cases,
    disk_hit,
    evicted,
    host_hit,
    other_salt,
    prefix_hit,
    prefix_replayed,
    shared_prefixes,
)
from bench.equivalence_cells.prompts import BLOCK, Case
from bench.equivalence_cells.subject import (
    GREEDY,
    HOST,
    NO_WINDOWS,
    WARM,
    Answer,
    Answers,
    Found,
    Proof,
    Subject,
    collect,
    gather,
    request_of,
    rows_of,
)
from engine import Engine, Request
from engine.results import StepResult

_BEFORE = 5  # tokens that a request has given out when it is disturbed
_TOGETHER = 5  # tokens at least of each prompt that come in one step with a neighbour's
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
    return _one_by_one(subject, subject.cases, 8192)


def chunks(size: int) -> Run:
    return lambda subject: _one_by_one(subject, _in_chunks_of(size, subject), size)


def _one_by_one(subject: Subject, cases: list[Case], size: int) -> Found:
    """Each alone, in exactly the steps that a budget of `size` makes, and the rows of a first time."""
    engine = subject.engine(token_budget=size, tiers=NO_WINDOWS)
    answers: Answers = {}
    so_taken = 0
    for case in cases:
        before = engine.statistics()
        engine.add(request_of(case))
        answers |= collect([engine])
        now = engine.statistics()
        steps, rows = now.steps - before.steps, now.rows - before.rows
        so_taken += (steps, rows) == (-(-case.length // size) + GREEDY.max_tokens - 1, rows_of(case))
    names = [case.name for case in cases]
    return Found(answers, Proof({"prompts_in_their_steps": (so_taken, len(cases))}), names)


def _in_chunks_of(size: int, subject: Subject) -> list[Case]:
    """The cases that so small a budget cuts, and does not take for ever."""
    fit = [case for case in subject.cases if size >= 64 or case.length <= _MOST_ONE_BY_ONE]
    return [case for case in fit if case.length > size]


def neighbours(subject: Subject) -> Found:
    engine = subject.engine(token_budget=96, max_sequences=6)
    for case in sorted(
        subject.cases, key=lambda case: -case.length
    ):  # or the last may read when all have ended
        engine.add(request_of(case))
    beside = Counter[str]()

    def look(result: StepResult) -> None:
        names = {output.request_id for output in result.tokens}
        beside.update(names if len(names) > 1 else ())

    answers = collect([engine], look)
    together = sum(beside[case.name] >= _TOGETHER for case in subject.cases)
    return Found(answers, Proof({"prompts_beside_others": (together, len(subject.cases))}))


def preempted(how: str) -> Run:
    """An urgent request takes the one place that there is, and gives it back."""

    def run(subject: Subject) -> Found:
        engine = subject.engine(max_sequences=1, preemption=how, tiers=HOST)
        answers: Answers = {}
        gave_way = 0
        for case in subject.cases:
            before = engine.statistics()
            _disturb(engine, case, answers)
            engine.check_integrity()
            now = engine.statistics()
            swapped = now.scheduler.swapped > before.scheduler.swapped
            moved = now.swapped_bytes > before.swapped_bytes
            found = (now.scheduler.preemptions > before.scheduler.preemptions, swapped, moved)
            gave_way += found == (True, how == "swap", how == "swap")
        return Found(answers, Proof({"disturbed_prompts": (gave_way, len(subject.cases))}))

    return run


def _disturb(engine: Engine, case: Case, answers: Answers) -> None:
    """Answer it, with an urgent request in its middle."""
    engine.add(request_of(case, priority=1))
    urgent = Request(f"urgent-{case.name}", case.prompt_ids[:16], WARM, cache_salt="urgent")
    ends: Answers = {}
    while engine.has_work:
        result = engine.step()
        gather(result, ends)
        if is_disturbed(ends, case) and urgent.id not in ends:
            engine.add(urgent)
    answers |= {name: answer for name, answer in ends.items() if name != urgent.id}


def is_disturbed(answers: Answers, case: Case) -> bool:
    """Whether it is so far that something is to happen to it."""
    return case.name in answers and len(answers[case.name].token_ids) == _BEFORE


def choices(subject: Subject) -> Found:
    """Three outputs of one prompt, greedy, and so equal: its rows once, and a copy of the block that it has
    begun for each further one. As many prompts at once as leave room for theirs: an output that has to wait
    for its place computes the prompt's last rows anew."""
    engine = subject.engine(max_sequences=3 * _AT_ONCE, kv_cache_bytes=subject.room_for_all())
    answers: Answers = {}
    for start in range(0, len(subject.cases), _AT_ONCE):
        for case in subject.cases[start : start + _AT_ONCE]:
            engine.add(Request(case.name, case.prompt_ids, GREEDY, choices=3, cache_salt=case.name))
        answers |= collect([engine])
    rows = sum(rows_of(case) + 2 * (GREEDY.max_tokens - 1) for case in subject.cases)
    begun = sum(case.length % BLOCK > 0 for case in subject.cases)
    names = [name for case in subject.cases for name in (case.name, f"{case.name}#1", f"{case.name}#2")]
    return Found(answers, _shared(engine, rows, 2 * len(subject.cases), 2 * begun), names)


def _shared(engine: Engine, rows: int, forks: int, copies: int) -> Proof:
    """By every fork: `rows` are the least there can be, and each one that computes anew needs more.

    `copies`: of blocks in which a fork and its origin both write.
    """
    counts = engine.statistics()
    taken = {
        "forks": (counts.scheduler.forks, forks), "copied_blocks": (counts.scheduler.copied_blocks, copies),
        "rows": (counts.rows, rows),
    }  # fmt: skip
    return Proof(taken, {"further_rows": counts.rows - rows})


def forked(subject: Subject) -> Found:
    """A fork in the middle of an answer: behind the tokens that both have, each end is the right one."""
    engine = subject.engine(max_sequences=2 * _AT_ONCE, kv_cache_bytes=subject.room_for_all())
    answers: Answers = {}
    for start in range(0, len(subject.cases), _AT_ONCE):
        at_once = subject.cases[start : start + _AT_ONCE]
        for case in at_once:
            engine.add(request_of(case))
        while engine.has_work:
            gather(engine.step(), answers)
            for case in at_once:
                if is_disturbed(answers, case):
                    engine.fork(case.name, _fork_of(case))
        engine.check_integrity()
    for case in subject.cases:
        one, other = answers.get(case.name), answers.pop(_fork_of(case), None)
        if one is not None and other is not None:
            answers[_fork_of(case)] = Answer(
                one.token_ids[:_BEFORE] + other.token_ids, one.logprobs[:_BEFORE] + other.logprobs
            )
    rows = sum(rows_of(case) + GREEDY.max_tokens - _BEFORE for case in subject.cases)
    begun = sum((case.length + _BEFORE - 1) % BLOCK > 0 for case in subject.cases)
    names = [name for case in subject.cases for name in (case.name, _fork_of(case))]
    return Found(answers, _shared(engine, rows, len(subject.cases), begun), names)


def _fork_of(case: Case) -> str:
    return f"{case.name}#fork"


def weights_reloaded(subject: Subject) -> Found:
    """The same weights come from their files again, as another version, in the middle of every answer: what
    each has had until then is computed anew."""
    room = subject.room_for_all()
    engine = subject.engine(tiers=HOST, kv_cache_bytes=room, max_sequences=len(subject.cases))
    answers: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
    reloads = going_on = again = 0
    while engine.has_work:
        gather(engine.step(), answers)
        out = {case.name: len(answers.get(case.name, Answer()).token_ids) for case in subject.cases}
        if not reloads and min(out.values()) >= _BEFORE:
            reloads += 1
            engine.update_weights("2", subject.name)
            begun = [case for case in subject.cases if out[case.name] < GREEDY.max_tokens]
            going_on, again = len(begun), sum(case.length + out[case.name] - 1 for case in begun)
    engine.check_integrity()
    engine.close()
    counts, once = engine.statistics(), sum(map(rows_of, subject.cases))
    taken = {
        "reloads": (reloads, 1), "prompts_going_on": (going_on, len(subject.cases)),
        "rows_again": (counts.rows - once, max(again, 1)),
    }  # fmt: skip
    absent = {"further_rows": counts.rows - once - again, "loaded_blocks": counts.scheduler.loaded_blocks}
    return Found(answers, Proof(taken, absent))


def handed_over(subject: Subject) -> Found:
    engines = [subject.engine(role="prefill"), subject.engine(role="decode")]
    handed = set[str]()

    def look(result: StepResult) -> None:
        handed.update(handoff.header.request_id for handoff in result.handoffs)

    for case in subject.cases:
        engines[0].add(request_of(case))
    answers = collect(engines, look)
    rows, least = engines[1].statistics().rows, len(subject.cases) * (GREEDY.max_tokens - 1)
    taken = {"handed_prompts": (len(handed), len(subject.cases)), "decode_rows": (rows, least)}
    return Found(answers, Proof(taken, {"computed_again": rows - least}))


def _cut(size: int) -> Callable[[Subject], bool]:
    return lambda subject: bool(_in_chunks_of(size, subject))


CELLS = (
    Cell("monolithic", monolithic),
    *(Cell(f"chunks of {size}", chunks(size), _cut(size)) for size in (1, 7, 64, 512)),
    Cell("batch neighbours", neighbours),
    Cell("shared prefixes", shared_prefixes, lambda subject: bool(begun_cases(subject))),
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
