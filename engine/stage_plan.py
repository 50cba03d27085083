"""The time to a first token by stage, against the plan: each stage's share of the work.

The plan counts matrix products: of a prompt's rows the encoder runs all, the bridge (what the layer at the
cut makes keys of) all, the decoder the last window, and the head one. Attention itself is left out: its part
is small at the length that is measured. Source: fact sheet, sections 1.3 and 11.2.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.checkpoint.family import Family, read_family
from engine.checkpoint.folder import read_config
from engine.checkpoint.parts import Part
from engine.model.base import Bounds, ChunkRows
from engine.model.deepseek.serving import DeepseekServed
from engine.model.stages import STAGES, Stage

_RUNS = 3  # the shortest counts
_OFF = 0.2  # of the time: what a stage takes more than planned before that is named
_LAYER = re.compile(r"layers\.(\d+)\.")

Shares = Mapping[Stage, float]


@dataclass(frozen=True, slots=True)
class StageShare:
    stage: Stage
    time_ns: int
    share: float  # of the time
    planned: float  # of the work


@dataclass(frozen=True, slots=True)
class FirstToken:
    """`rows` of a prompt to its first token, and what most likely makes a stage take more than its share."""

    rows: int
    stages: tuple[StageShare, ...]
    as_planned: bool
    cause: str

    @property
    def time_ns(self) -> int:
        return sum(stage.time_ns for stage in self.stages)


def time_first_token(served: DeepseekServed, ids: Sequence[int]) -> FirstToken:
    """Blocks for three prompts."""
    window = served.text.shape.sliding_window
    times = min((_time(served, ids) for _ in range(_RUNS)), key=lambda times: sum(times.values()))
    planned = planned_shares(read_family(read_config(served.path)), len(ids), min(window, len(ids)))
    return compare(
        len(ids), times, planned, replay=served.resume_rules.decoder,
        compiled=served.operations.fused is not None,
    )  # fmt: skip


def planned_shares(family: Family, rows: int, decoder_rows: int) -> Shares:
    """Of the work of one prompt."""
    config = family.config
    chosen = config.num_experts_per_tok / config.n_routed_experts
    work: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
    for entry in family.entries:
        if entry.section != "backbone" or entry.kind == "ids" or entry.name == "embed.weight":
            continue
        stage = _stage_of(entry.name, family.cut)
        times = {"encoder": rows, "bridge": rows, "decoder": decoder_rows}[stage]
        times = 1 if entry.name == "head.weight" else times
        work[stage] += times * entry.num_values * (chosen if entry.kind == "expert" else 1)
    return _shares(work)


def compare(
    rows: int, times: Mapping[Stage, int], planned: Shares, *, replay: bool, compiled: bool
) -> FirstToken:
    """`replay`: decoder layers left rows out; `compiled`: the kernels ran."""
    shares = _shares(times)
    worst = max(STAGES, key=lambda stage: shares[stage] - planned[stage])
    as_planned = shares[worst] - planned[worst] <= _OFF
    stages = tuple(StageShare(stage, times[stage], shares[stage], planned[stage]) for stage in STAGES)
    if as_planned:
        longest = max(STAGES, key=lambda stage: shares[stage])
        cause = f"none stands out: the {longest} has most of the work"
    else:
        cause = f"{worst}: {_cause(worst, replay=replay, compiled=compiled)}"
    return FirstToken(rows, stages, as_planned, cause)


def _cause(stage: Stage, *, replay: bool, compiled: bool) -> str:
    if stage == "decoder" and not replay:
        return "replay is off, so decoder layers run every row of the prompt"
    if not compiled:
        return "the kernels for this processor are not built, and PyTorch runs each small operation"
    if stage == "encoder":
        return "Engram tables are read from disk, or weights that were not in memory yet"
    if stage == "bridge":
        return "small operations of one layer: compressor, rotation, rounding of entries and index keys"
    return "its few rows use most experts, so weights are read for little work; or another program runs"


def _stage_of(name: str, cut: int) -> Stage:
    if not Part(encoder_only=True).holds(name, cut):
        return "decoder"
    layer = _LAYER.match(name)
    return "bridge" if layer is not None and int(layer[1]) == cut else "encoder"


def _time(served: DeepseekServed, ids: Sequence[int]) -> dict[Stage, int]:
    size = served.text.block_tokens
    num_blocks = -(-len(ids) // size)
    state = served.new_state(num_blocks, size, 1)
    bounds = Bounds(decoder_from=served.resume_rules.decoder_from(len(ids)))
    state.begin(0, ())
    state.run([ChunkRows(ids, 0, 0, range(num_blocks), bounds, wants_logits=True)])
    spent = state.stages.spent()
    return {stage: spent.of(stage) for stage in STAGES}


def _shares(amounts: Mapping[Stage, float]) -> dict[Stage, float]:
    total = sum(amounts.values())
    return {stage: amounts[stage] / total for stage in STAGES}
