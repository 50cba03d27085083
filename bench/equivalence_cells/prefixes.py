"""Cells of known prefixes: on the device, in host memory, on disk, driven out, and of another tenant."""

import tempfile
from collections.abc import Sequence

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
)
from engine import Engine, Request


def shared_prefixes(subject: Subject) -> Found:
    """All prompts of one tenant, which begin alike: behind what is known of each other, in turn.

    Where windows do not run again, they are kept more often than by default.
    """
    often = {} if subject.replay or not subject.window else {"window_interval": subject.window}
    engine = subject.engine(token_budget=128, tiers=often, kv_cache_bytes=subject.room_for_all())
    answers: Answers = {}
    for case in subject.cases:
        engine.add(Request(case.name, case.prompt_ids, GREEDY))
        answers |= collect([engine])
    alike = begun_cases(subject)
    hits = sum(answers[case.name].num_cached > 0 for case in alike)
    return Found(answers, Proof({"hit_prompts": (hits, len(alike))}), may_resume=True)


def begun_cases(subject: Subject) -> list[Case]:
    """Those that find something of an earlier one; none where all are short."""
    return [case for number, case in enumerate(subject.cases) if _is_begun(subject, number)]


def _is_begun(subject: Subject, number: int) -> bool:
    """Whether whole blocks that an earlier case has left reach beyond a window of this one."""
    ids = subject.cases[number].prompt_ids
    alike = (_alike(ids, other.prompt_ids) for other in subject.cases[:number])
    return max((count // BLOCK * BLOCK for count in alike), default=0) > subject.window


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def prefix_hit(subject: Subject) -> Found:
    """Each prompt again, behind the blocks that the device still has: all of them."""
    engine = subject.engine(kv_cache_bytes=subject.room_for_all())
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    counts, long = engine.statistics().scheduler, subject.long_cases()
    taken = {"wholly_hit_prompts": (_hits(subject, answers, whole=True), len(long))}
    if subject.window:
        taken["exact_resumes"] = (counts.exact_resumes, len(long))
    return Found(answers, Proof(taken, {"replayed_resumes": counts.replayed_resumes}))


def _hits(subject: Subject, answers: Answers, *, whole: bool = False) -> int:
    """How many of the long prompts were found, `whole`: with all blocks that a first time has left."""
    found = [subject.positions_found(answers.get(case.name, Answer())) for case in subject.long_cases()]
    known = [subject.positions_left(case) for case in subject.long_cases()]
    return sum(have >= (had if whole else 1) for have, had in zip(found, known, strict=True))


def prefix_replayed(subject: Subject) -> Found:
    """Windows are gone, and the last one runs again: the answer is that of the rule, not of a whole pass."""
    engine = subject.engine(tiers=NO_WINDOWS, token_budget=64)
    subject.answer([engine], subject.cases, WARM)
    answers = subject.answer([engine], subject.cases)
    counts, long = engine.statistics().scheduler, subject.long_cases()
    replayed = sum(bool(answers[case.name].resumed) for case in long if case.name in answers)
    taken = {
        "replayed_prompts": (replayed, len(long)),
        "replayed_resumes": (counts.replayed_resumes, len(long)),
    }
    return Found(answers, Proof(taken, {"exact_resumes": counts.exact_resumes}), may_resume=True)


def host_hit(subject: Subject) -> Found:
    """The device forgets every block; those of host memory come back."""
    engine = subject.engine(tiers=HOST)
    subject.answer([engine], subject.cases, WARM)
    forget_device(engine)
    answers = subject.answer([engine], subject.cases)
    counts, blocks = engine.statistics(), _blocks_known(subject)
    return Found(answers, Proof({
        "hit_prompts": (_hits(subject, answers), len(subject.long_cases())),
        "loaded_blocks": (counts.scheduler.loaded_blocks, blocks),
        "host_hits": (counts.tiers.blocks.hits, blocks),
    }))  # fmt: skip


def _blocks_known(subject: Subject) -> int:
    return sum(case.num_known // BLOCK for case in subject.cases)


def forget_device(engine: Engine) -> None:
    """Every block that nobody holds is reused."""
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))


def disk_hit(subject: Subject) -> Found:
    """Another engine finds what the first has left on disk. With replay on, windows are not kept there. The
    disk gets the prompts one by one: what it has no time for, all at once, is not written."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = {**HOST, "disk_path": folder}
        first = subject.engine(tiers=tiers)
        for case in subject.cases:
            subject.answer([first], [case], WARM)
            first.flush()
        dropped = first.statistics().tiers.dropped_writes
        first.close()
        second = subject.engine(tiers=tiers)
        answers = subject.answer([second], subject.cases)
        counts = second.statistics()
        second.close()
    disk, blocks = counts.tiers.disk, _blocks_known(subject)
    assert disk is not None
    taken = {
        "hit_prompts": (_hits(subject, answers), len(subject.long_cases())),
        "disk_hits": (disk.hits, blocks), "loaded_blocks": (counts.scheduler.loaded_blocks, blocks),
    }  # fmt: skip
    absent = {"corrupt": disk.corrupt, "failures": disk.failures, "faults": disk.faults, "dropped": dropped}
    proof = Proof(taken, absent)
    return Found(answers, proof, may_resume=subject.window > 0 and subject.replay)


def evicted(subject: Subject) -> Found:
    """In a cache that holds the longest prompt alone, each drives out what those before have left, or its
    end: behind blocks that stay, windows may run again."""
    engine = subject.engine()
    pool, longest = engine.pool, subject.longest + GREEDY.max_tokens
    held = pool.allocate(
        pool.num_available - pool.blocks_for(longest)
    )  # no engine takes so small a cache itself
    tokens = pool.allocate(pool.blocks_for(GREEDY.max_tokens))
    answers: Answers = {}
    for case in subject.cases:
        _run_alone(engine, request_of(case, WARM), {})
    pool.release(tokens)
    for case in subject.cases:
        _run_alone(engine, request_of(case), answers)
    pool.release(held)
    engine.check_integrity()
    cut = len(subject.long_cases()) - _hits(subject, answers, whole=True)
    taken = {"cut_prompts": (cut, len(subject.long_cases())), "evictions": (pool.statistics().evictions, cut)}
    return Found(answers, Proof(taken), may_resume=subject.window > 0 and subject.replay)


def _run_alone(engine: Engine, request: Request, answers: Answers) -> None:
    """Where the cell itself holds blocks too."""
    engine.add(request)
    while engine.has_work:
        gather(engine.step(), answers)


def other_salt(subject: Subject) -> Found:
    """A tenant finds nothing of another's, and the same answers, while that one finds its own."""
    engine = subject.engine()
    answers: Answers = {}
    foreign = own = 0
    for case in subject.cases:
        subject.answer([engine], [case], WARM, salt="one")
        answers |= subject.answer([engine], [case], salt="other")
        again = subject.answer([engine], [case], WARM, salt="one")
        foreign += answers.get(case.name, Answer()).num_cached
        own += case in subject.long_cases() and subject.positions_found(again[case.name]) > 0
    taken = {"prompts_that_found_their_own": (own, len(subject.long_cases()))}
    return Found(answers, Proof(taken, {"cached_of_another": foreign}))
