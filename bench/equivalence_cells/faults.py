"""Ten faults put into the engine, and the cell that each must turn red."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bench.equivalence_cells.matrix import cell_named, judge
from bench.equivalence_cells.prompts import cases
from bench.equivalence_cells.subject import Subject
from engine import forward as forward_module
from engine.cache.host_tier import HostTier
from engine.cache.keys import root_key
from engine.model.base import ChunkRows, Model
from engine.model.deepseek import indexer, sequence_state
from engine.model.deepseek.serving import DeepseekState
from engine.model.registry import load_model
from engine.scheduler import admission, scheduler
from engine.scheduler.resume import Pass, Start
from engine.scheduler.scheduler import Chunk
from protocol.handoff import KvPayload

_LENGTHS = (131, 201, 331)  # odd, so that groups are open; the longest has more entries than candidates


@dataclass(frozen=True, slots=True)
class Fault:
    """Answers must differ, where the engine does not catch it itself by an `error`, and where no counter of
    what may not be (`told_by`) is all that could tell."""

    name: str
    cell: str
    put: Callable[[], AbstractContextManager[object]]
    error: str = ""
    told_by: str = ""


@dataclass(frozen=True, slots=True)
class Tried:
    """`green_before`: the cell without the fault, over the same prompts. `differing`: answers that came, and
    are not right, or what the fault's counter says. `expected`: the error by which the engine catches such a
    fault, and `error` that which ended the cell: another one says that the fault itself is broken."""

    fault: str
    cell: str
    green_before: bool
    differing: int
    error: str
    expected: str = ""

    @property
    def red(self) -> bool:
        """Whether the fault, and nothing else, turns the cell red."""
        caught = self.error.startswith(self.expected) if self.expected else self.differing > 0
        return self.green_before and caught

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "red": self.red}


def try_faults(faults: Sequence[Fault] | None = None) -> Iterator[Tried]:
    """Each fault on nano, whose every mechanism they touch; all where none are named."""
    model = load_model("nano", threads=1)
    try:
        for fault in FAULTS if faults is None else faults:
            yield _try(fault, model)
    finally:
        model.close()


def _try(fault: Fault, model: Model) -> Tried:
    """With a subject of its own, so that what one fault leaves hides no other."""
    cell = cell_named(fault.cell)
    subject = Subject("nano", model, True, cases(model.tokenizer(), _LENGTHS), 1, 4 << 20)
    try:
        before, after = judge(cell, subject), judge(cell, subject, fault.put)
    finally:
        subject.close()
    differing = after.absent.get(fault.told_by, 0) if fault.told_by else after.differing
    return Tried(fault.name, fault.cell, before.green, differing, after.error, fault.error)


def _flipped_byte() -> AbstractContextManager[object]:
    load = DeepseekState.import_block

    def flipped(self: DeepseekState, block: int, payload: KvPayload) -> None:
        damaged = payload.copy()
        damaged[0] ^= 0x77
        load(self, block, damaged)

    return patch.object(DeepseekState, "import_block", flipped)


def _no_scale() -> AbstractContextManager[object]:
    """The last byte of each entry of the first source, which scales its last channels."""
    keep = DeepseekState.export_block

    def unscaled(self: DeepseekState, block: int) -> KvPayload:
        payload = keep(self, block)
        source = next(iter(self.cache.sources.values()))
        width = source.main.shape[1]
        rows = self.cache.block_tokens // source.ratio
        payload[: rows * width].reshape(rows, width)[:, -1] = 0
        return payload

    return patch.object(DeepseekState, "export_block", unscaled)


def _no_lookback() -> AbstractContextManager[object]:
    def dropped(state: DeepseekState, slot: int, token_ids: Sequence[int]) -> None:
        return

    return patch.object(DeepseekState, "begin", dropped)


def _no_open_group() -> AbstractContextManager[object]:
    part = sequence_state._open_part  # pyright: ignore[reportPrivateUsage]

    def dropped(*arguments: Any) -> Any:
        found = part(*arguments)
        return replace(found, rows=found.rows.clone().fill_(-1))

    return patch.object(sequence_state, "_open_part", dropped)


def _shifted(*, start: int = 0, window: int = 0) -> AbstractContextManager[object]:
    """Bounds of the last pass behind windows that run again."""
    right = admission.first_start

    def wrong(*arguments: Any) -> Start:
        found = right(*arguments)
        if not found.resumed:
            return found
        bounds = found.passes[-1].bounds
        bounds = replace(bounds, start=bounds.start + start, window_from=bounds.window_from + window)
        return replace(found, passes=(*found.passes[:-1], Pass(bounds)))

    return patch.object(admission, "first_start", wrong)


def _wrong_position() -> AbstractContextManager[object]:
    right = forward_module.rows_of

    def wrong(chunk: Chunk) -> ChunkRows:
        rows, resumed = right(chunk), bool(chunk.sequence.request.generated_ids)
        return replace(rows, start=rows.start - 1) if resumed and rows.start > 0 else rows

    return patch.object(forward_module, "rows_of", wrong)


def _stale_candidates() -> AbstractContextManager[object]:
    """Each row chooses among the blocks of the row before."""
    right, last = indexer.candidate_blocks, list[Tensor]()

    def stale(scores: Tensor, visible: Tensor, size: int, k: int) -> Tensor:
        fresh = right(scores, visible, size, k)
        old = last[-1] if last and last[-1].shape == fresh.shape else fresh
        last[:] = [fresh]
        return old

    return patch.object(indexer, "candidate_blocks", stale)


def _no_salt() -> AbstractContextManager[object]:
    def unsalted(model: str, version: str, salt: str) -> bytes:
        return root_key(model, version)

    return patch.object(scheduler, "root_key", unsalted)


@contextmanager
def _other_version() -> Generator[None]:
    """Host memory keeps what it had under other weights, and keys do not tell them apart."""

    def blind(model: str, version: str, salt: str) -> bytes:
        return root_key("", "", salt)

    def keep(tier: HostTier) -> None:
        return

    with patch.object(scheduler, "root_key", blind), patch.object(HostTier, "clear", keep):
        yield


FAULTS = (
    Fault("a KV byte flipped", "host-tier hit", _flipped_byte),
    Fault("Engram look-back dropped", "prefix replayed", _no_lookback),
    Fault("open compressor group dropped", "preempted by swap", _no_open_group),
    Fault("window bound off by one", "prefix replayed", lambda: _shifted(window=1)),
    Fault("position off by one after resume", "killed and resumed", _wrong_position),
    Fault("stale candidate set", "chunks of 64", _stale_candidates),
    Fault("wrong salt", "another salt", _no_salt, told_by="cached_of_another"),  # of equal KV
    Fault("a scale byte dropped", "host-tier hit", _no_scale),
    Fault("replay rows one short", "prefix replayed", lambda: _shifted(start=1)),
    Fault("a tier entry of another model version", "weights changed", _other_version),
)
