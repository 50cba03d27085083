"""For every cell an engine that answers right without taking its path, or with some of its prompts alone: the
cell's counters must tell."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.equivalence_cells import paths, processes
from bench.equivalence_cells import subject as subject_module
from bench.equivalence_cells.matrix import Verdict, cell_named, judge
from bench.equivalence_cells.prompts import cases
from bench.equivalence_cells.subject import GREEDY, Subject
from engine import Engine, Request
from engine.cache.block_pool import BlockPool
from engine.cache.disk_tier import DiskTier
from engine.cache.host_tier import HostTier
from engine.model.base import Model
from engine.model.registry import load_model
from engine.request import Sequence
from engine.results import StepResult
from engine.scheduler import scheduler
from engine.scheduler.scheduler import Scheduler

_LENGTHS = (190, 230)  # whose shared start is longer than a window


@dataclass(frozen=True, slots=True)
class Detour:
    """`put` closes the path of these cells."""

    name: str
    cells: tuple[str, ...]
    put: Callable[[], AbstractContextManager[object]]
    lengths: tuple[int, ...] = _LENGTHS  # of prompts


@dataclass(frozen=True, slots=True)
class Seen:
    """`answers_right`: nothing but the counters could tell. `noticed`: they did."""

    detour: str
    cell: str
    answers_right: bool
    noticed: bool
    taken: dict[str, int]
    error: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def try_detours() -> Iterator[Seen]:
    """Each on nano, every time with a subject of its own."""
    model = load_model("nano", threads=1)
    try:
        for detour in DETOURS:
            for name in detour.cells:
                yield _try(detour, name, model)
    finally:
        model.close()


def _try(detour: Detour, name: str, model: Model) -> Seen:
    subject = Subject("nano", model, True, cases(model.tokenizer(), detour.lengths), 1, 4 << 20)
    try:
        found: Verdict = judge(cell_named(name), subject, detour.put)
    finally:
        subject.close()
    return Seen(detour.name, name, found.right, not found.proved, found.taken, found.error)


def _set(**settings: object) -> AbstractContextManager[object]:
    """Engines that have these, whatever the cell asks for."""
    right = Subject.engine

    def other(subject: Subject, **asked: object) -> Engine:
        return right(subject, **{**asked, **settings})

    return patch.object(Subject, "engine", other)


def _never(owner: type, name: str, answer: object) -> Callable[[], AbstractContextManager[object]]:
    def never(*_: object, **__: object) -> object:
        return answer

    return lambda: patch.object(owner, name, never)


def _at_first(
    owner: type, name: str, times: int, then: object
) -> Callable[[], AbstractContextManager[object]]:
    """So many calls are the engine's own; those behind them are answered by `then`."""

    def put() -> AbstractContextManager[object]:
        right, left = getattr(owner, name), iter(range(times))

        def closing(*arguments: object, **settings: object) -> object:
            return then if next(left, None) is None else right(*arguments, **settings)

        return patch.object(owner, name, closing)

    return put


@contextmanager
def _one_pair() -> Generator[None]:
    """Two requests run beside each other, and those behind them alone."""
    add, step, held, seen = Engine.add, Engine.step, deque[Request](), set[str]()

    def add_first(engine: Engine, request: Request) -> None:
        seen.add(request.id)
        if len(seen) > 2:
            held.append(request)
        else:
            add(engine, request)

    def step_then_add(engine: Engine) -> StepResult:
        result = step(engine)
        if held and not engine.has_work:
            add(engine, held.popleft())
        return result

    with patch.object(Engine, "add", add_first), patch.object(Engine, "step", step_then_add):
        yield


def _first_forks_share() -> AbstractContextManager[object]:
    """Those of the first prompt."""
    right = Scheduler.runs_fork

    def runs(self: Scheduler, parent: Sequence) -> bool:
        return parent.request.id.startswith("00-") and right(self, parent)

    return patch.object(Scheduler, "runs_fork", runs)


def _the_first_gives_way() -> AbstractContextManager[object]:
    right = scheduler.outranks

    def first(one: Sequence, other: Sequence, now_ns: int, starvation_ns: int) -> bool:
        return other.request.id.startswith("00-") and right(one, other, now_ns, starvation_ns)

    return patch.object(scheduler, "outranks", first)


def _room() -> AbstractContextManager[object]:
    return patch.object(Subject, "longest", 700)


def _reloaded_too_late() -> AbstractContextManager[object]:
    return patch.object(paths, "_BEFORE", GREEDY.max_tokens)


def _nobody_gives_way() -> AbstractContextManager[object]:
    def never(*_: object) -> bool:
        return False

    return patch.object(scheduler, "outranks", never)


def _killed_too_late() -> AbstractContextManager[object]:
    return patch.object(processes, "_LEAST", GREEDY.max_tokens)


def _same_weights() -> AbstractContextManager[object]:
    def same(source: Path, _: Path) -> Path:
        return source

    return patch.object(subject_module, "change_weights", same)


DETOURS = (
    Detour("prompts go in pieces", ("monolithic",), lambda: _set(token_budget=64)),
    Detour(
        "no step is bounded", tuple(f"chunks of {size}" for size in (1, 7, 64)),
        lambda: _set(token_budget=8192), (130,),
    ),
    Detour("no step is bounded", ("chunks of 512",), lambda: _set(token_budget=8192), (530,)),
    Detour("one after another", ("batch neighbours",), lambda: _set(max_sequences=1)),
    Detour("one pair, the rest alone", ("batch neighbours",), _one_pair, (40, 50, 60, 70)),
    Detour(
        "no block is known",
        ("shared prefixes", "prefix hit", "prefix replayed", "after eviction", "another salt"),
        _never(BlockPool, "register", False),
    ),
    Detour(
        "blocks of the first prompt are known",
        ("prefix hit", "prefix replayed", "another salt"), _at_first(BlockPool, "register", 11, False),
    ),
    Detour("there is room for all", ("after eviction",), _room),
    Detour("host memory finds nothing", ("host-tier hit",), _never(HostTier, "get", None)),
    Detour("host memory keeps the first prompt", ("host-tier hit",), _at_first(HostTier, "put", 12, None)),
    Detour("the disk finds nothing", ("disk-tier hit",), _never(DiskTier, "get", None)),
    Detour("the disk finds the first prompt", ("disk-tier hit",), _at_first(DiskTier, "get", 11, None)),
    Detour("no room to swap", ("preempted by swap",), _never(HostTier, "reserve", False)),
    Detour("room to swap once", ("preempted by swap",), _at_first(HostTier, "reserve", 1, False)),
    Detour("nobody gives way", ("preempted by swap", "preempted by recompute"), _nobody_gives_way),
    Detour(
        "the first gives way", ("preempted by swap", "preempted by recompute"), _the_first_gives_way
    ),
    Detour("forks compute anew", ("n>1", "forked"), _never(Scheduler, "runs_fork", False)),
    Detour("forks of the first share", ("n>1", "forked"), _first_forks_share),
    Detour("weights stay", ("weights reloaded",), _never(Engine, "update_weights", None)),
    Detour("reloaded when all is said", ("weights reloaded",), _reloaded_too_late),
    Detour("the other weights are the same", ("weights changed",), _same_weights),
    Detour("killed when all is said", ("killed and resumed",), _killed_too_late),
    Detour("one engine does all", ("handed over",), lambda: _set(role="both")),
)  # fmt: skip
