"""The cells: one function a path. Each says by the engine's counters whether its path was really taken."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.equivalence_cells.prompts import Case
from bench.equivalence_cells.subject import GREEDY, WARM, Answers, Found, Subject, collect, gather
from engine import Engine, Request, SamplingParams
from engine.results import StepResult

HOST = {"host_bytes": 1 << 30}
_BEFORE = 5  # tokens that a request has given out when it is disturbed
_MOST_ONE_BY_ONE = 256  # tokens of a prompt that goes in chunks of 1 and 7

Run = Callable[[Subject], Found]


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    run: Run
    applies: Callable[[Subject], bool] = lambda _: True


def chunks(size: int) -> Run:
    def run(subject: Subject) -> Found:
        fit = [case for case in subject.cases if size >= 64 or case.length <= _MOST_ONE_BY_ONE]
        engine = subject.engine(token_budget=size)
        answers: Answers = {}
        for case in fit:
            engine.add(request_of(case))
            answers |= collect([engine])
        steps = engine.statistics().steps
        least = sum(-(-case.length // size) + GREEDY.max_tokens - 1 for case in fit)
        return Found(answers, {"steps": steps, "least": least}, steps >= least and bool(fit))

    return run


def neighbours(subject: Subject) -> Found:
    engine = subject.engine(token_budget=96, max_sequences=6)
    for case in subject.cases:
        engine.add(request_of(case))
    most = 0

    def look(result: StepResult) -> None:
        nonlocal most
        most = max(most, len(result.tokens))

    answers = collect([engine], look)
    return Found(answers, {"tokens_in_a_step": most}, most >= 2)


def prefix_hit(subject: Subject) -> Found:
    """Each prompt again, behind the blocks that the device still has."""
    engine = subject.engine()
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    hits = sum(answer.num_cached > 0 for answer in answers.values())
    exact = engine.statistics().scheduler.exact_resumes
    proved = hits >= subject.long_enough() > 0 and (subject.window == 0 or exact >= subject.long_enough())
    return Found(answers, {"hits": hits, "exact_resumes": exact}, proved)


def prefix_replayed(subject: Subject) -> Found:
    """Windows are gone, and the last one runs again: equal to the plain engine resumed at the same place."""
    forgetful = {"window_bytes": 0}
    engine = subject.engine(tiers=forgetful, token_budget=64)
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    replayed = engine.statistics().scheduler.replayed_resumes
    expected = subject.resumed_plainly(answers)
    return Found(answers, {"replayed_resumes": replayed}, replayed >= subject.long_enough() > 0, expected)


def host_hit(subject: Subject) -> Found:
    """The device forgets every block; those of host memory come back."""
    engine = subject.engine(tiers=HOST)
    subject.answer([engine], subject.cases, WARM)
    forget_device(engine)
    answers = subject.answer([engine], subject.cases)
    counts = engine.statistics()
    proof = {"loaded_blocks": counts.scheduler.loaded_blocks, "host_hits": counts.tiers.blocks.hits}
    return Found(answers, proof, counts.scheduler.loaded_blocks >= subject.long_enough() > 0)


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
    assert counts.tiers.disk is not None
    proof = {"disk_hits": counts.tiers.disk.hits, "loaded_blocks": counts.scheduler.loaded_blocks}
    expected = subject.resumed_plainly(answers) if subject.window and subject.replay else None
    proved = min(proof.values()) >= subject.long_enough() > 0 and counts.tiers.disk.corrupt == 0
    return Found(answers, proof, proved, expected)


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
    evictions = engine.statistics().pool.evictions
    return Found(answers, {"evictions": evictions}, evictions > 0)


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
        counts = engine.statistics()
        swapped, preemptions = counts.scheduler.swapped, counts.scheduler.preemptions
        proof = {"preemptions": preemptions, "swapped": swapped, "swapped_bytes": counts.swapped_bytes}
        right = (swapped, counts.swapped_bytes > 0) == ((preemptions, True) if how == "swap" else (0, False))
        own = {name: answer for name, answer in answers.items() if not name.startswith("urgent-")}
        return Found(own, proof, preemptions >= len(subject.cases) and right)

    return run


def request_of(case: Case, sampling: SamplingParams = GREEDY, priority: int = 0) -> Request:
    """Its own salt keeps other cases' prefixes away, which cells do not mean to hit."""
    return Request(case.name, case.prompt_ids, sampling, priority, cache_salt=case.name)


def is_disturbed(answers: Answers, case: Case) -> bool:
    """Whether it is so far that something is to happen to it."""
    return case.name in answers and len(answers[case.name].token_ids) == _BEFORE


def shared_prefixes(subject: Subject) -> Found:
    """All prompts of one tenant, which begin alike: behind what is known of each other, in turn."""
    engine = subject.engine(token_budget=128)
    answers: Answers = {}
    for case in subject.cases:
        engine.add(Request(case.name, case.prompt_ids, GREEDY))
        answers |= collect([engine])
    hits = sum(answer.num_cached > 0 for answer in answers.values())
    expected = subject.resumed_plainly(answers) if subject.window and subject.replay else None
    return Found(answers, {"hits": hits}, hits > 0 or len(subject.cases) < 5, expected)


def choices(subject: Subject) -> Found:
    """Three outputs of one prompt, greedy, and so equal."""
    engine = subject.engine(max_sequences=24)
    expected: Answers = {}
    for case in subject.cases:
        engine.add(Request(case.name, case.prompt_ids, GREEDY, choices=3, cache_salt=case.name))
        expected |= {f"{case.name}{end}": subject.plain()[case.name] for end in ("", "#1", "#2")}
    answers = collect([engine])
    counts = engine.statistics().scheduler
    proof = {"forks": counts.forks, "copied_blocks": counts.copied_blocks}
    return Found(
        answers, proof, counts.forks == 2 * len(subject.cases) and counts.copied_blocks > 0, expected
    )


def forked(subject: Subject) -> Found:
    """A fork in the middle of an answer: both ends equal the plain one's."""
    engine = subject.engine()
    answers: Answers = {}
    expected: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
        plain = subject.plain()[case.name]
        expected[case.name] = plain
        rest = replace(plain, token_ids=plain.token_ids[_BEFORE:], logprobs=plain.logprobs[_BEFORE:])
        expected[f"{case.name}-fork"] = rest
    while engine.has_work:
        gather(engine.step(), answers)
        for case in subject.cases:
            if is_disturbed(answers, case):
                engine.fork(case.name, f"{case.name}-fork")
    engine.check_integrity()
    forks = engine.statistics().scheduler.forks
    return Found(answers, {"forks": forks}, forks == len(subject.cases), expected)


def weights_reloaded(subject: Subject) -> Found:
    """The same weights come from their files again, as another version, in the middle of the answers."""
    engine = subject.engine(tiers=HOST)
    answers: Answers = {}
    for case in subject.cases:
        engine.add(request_of(case))
    reloads = 0
    while engine.has_work:
        gather(engine.step(), answers)
        started = len(answers) == len(subject.cases)
        if not reloads and started and min(len(a.token_ids) for a in answers.values()) >= _BEFORE:
            reloads += 1
            engine.update_weights("2", subject.name)
    engine.check_integrity()
    engine.close()
    counts = engine.statistics()
    proof = {"reloads": reloads, "rows": counts.rows, "loaded_blocks": counts.scheduler.loaded_blocks}
    again = counts.rows >= sum(2 * case.length + GREEDY.max_tokens for case in subject.cases)
    return Found(answers, proof, again and counts.scheduler.loaded_blocks == 0)


def other_salt(subject: Subject) -> Found:
    """A tenant finds nothing of another's, and the same answers."""
    engine = subject.engine()
    last = subject.cases[-1]
    subject.answer([engine], [last], WARM, salt="one")
    answers = subject.answer([engine], [last], salt="other")
    cached = answers[last.name].num_cached
    own = subject.answer([engine], [last], WARM, salt="one")[last.name].num_cached
    return Found(answers, {"cached_of_another": cached, "cached_own": own}, cached == 0 < own)


def handed_over(subject: Subject) -> Found:
    engines = [subject.engine(role="prefill"), subject.engine(role="decode")]
    answers = subject.answer(engines, subject.cases)
    rows = engines[1].statistics().rows
    least = len(subject.cases) * (GREEDY.max_tokens - 1)
    return Found(answers, {"decode_rows": rows}, rows == least)


CELLS = (
    *(Cell(f"chunks of {size}", chunks(size)) for size in (1, 7, 64, 512)),
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
