"""DSpark: drafts of the next tokens in one parallel pass behind the model's own layers (section 8).

A step of speculation: `propose` drafts behind each sequence's newest token, the model runs that token and its
drafts in one forward, engine.speculation says how many hold, and `write` keeps the context of those alone.
Shapes: S sequences, R rows of a draft, T = S*R, C channels, V vocabulary, M rank of the Markov head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.cache import ROLLBACK_ROWS
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_fields import refuse
from engine.model.deepseek.dspark_block import DraftBlock
from engine.model.deepseek.dspark_context import Anchor, DraftCache, DraftPlan, StreamTap
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.model import DeepseekModel
from engine.model.deepseek.moe import share_of
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.records import encode
from engine.model.deepseek.roles import cut_layer
from engine.model.deepseek.rope import RotaryTables
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from engine.speculation.distribution import Logits
from protocol.errors import InvalidInput

Pick = Callable[[int, Tensor], Tensor]
"""Chooses the k-th draft of each sequence: k and logits [S, V], which follow from earlier ones; int64 [S]."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts d_0 .. d_{R-1} of each anchor; d_k is the token k + 1 behind it."""

    token_ids: Tensor  # int64 [S, R]
    logits: Tensor  # [S, R, V], what each was picked from
    confidence: Tensor  # [S, R]: the estimated chance that d_k holds where those before it do

    def drafts(self, lengths: Sequence[int]) -> list[list[int]]:
        """The first drafts of each sequence, as many as `lengths` says."""
        return [
            [int(token) for token in row[:length]]
            for row, length in zip(self.token_ids, lengths, strict=True)
        ]


def pick_likeliest(index: int, logits_SV: Tensor) -> Tensor:
    """Ties go to the lowest id, as in the sampler."""
    return torch.from_numpy(logits_SV.numpy().argmax(1))  # pyright: ignore[reportUnknownMemberType]


def pick_each(picks: Sequence[Callable[[Logits], int]]) -> Pick:
    """Of each sequence by its own rule, in order: `SampledDrafts.pick`, say."""

    def pick(index: int, logits_SV: Tensor) -> Tensor:
        return torch.tensor([one(row) for one, row in zip(picks, logits_SV.numpy(), strict=True)])

    return pick


class DraftModel:
    """Draft blocks and their heads; embedding and head are the model's. Not thread-safe; holds no state."""

    def __init__(self, model: DeepseekModel, source: TensorSource) -> None:
        """Drafts of the model's part. Raises BrokenModelFile: a tensor missing or misshapen, or a config that
        cannot draft; InvalidInput: a part that cannot.
        """
        self.config = config = model.config
        _check(config)
        if model.part.encoder_only:
            raise InvalidInput("part.encoder_only: drafts read the decoder's streams, which are elsewhere")
        c, rank, last = config.hidden_size, config.dspark_markov_rank, config.num_nextn_predict_layers - 1
        self._model, self._table = model, RotaryTables.of(config).window
        width = c * len(config.dspark_target_layer_ids)
        self._main = Dense.prepared(source.take("mtp.0.main_proj.weight", (c, width)), model.operations)
        self._main_norm = RmsNorm.take(source, "mtp.0.main_norm", c, config.rms_norm_eps)
        shares = [share_of(model.part.draft_experts_of(n), model.exchange) for n in range(last + 1)]
        self._blocks = [
            DraftBlock(config, source, model.operations, number, share=share)
            for number, share in enumerate(shares)
        ]
        prefix, v = f"mtp.{last}", config.vocab_size
        self._norm = RmsNorm.take(source, f"{prefix}.norm", c, config.rms_norm_eps)
        self._markov_VM = source.take(f"{prefix}.markov_head.embed.weight", (v, rank))
        self._markov = Dense.of(source.take(f"{prefix}.markov_head.head.weight", (v, rank)))
        self._sure = Dense.of(source.take(f"{prefix}.confidence_head.proj.weight", (1, c + rank)))

    @property
    def num_rows(self) -> int:
        """Tokens of a draft."""
        return self.config.dspark_block_size

    def new_cache(self, num_slots: int) -> DraftCache:
        return DraftCache(self.config, num_slots)

    def tap(self) -> StreamTap:
        """A new observer, for one forward step of the model."""
        return StreamTap(self.config)

    @torch.inference_mode()
    def write(self, cache: DraftCache, tap: StreamTap, stops: Mapping[int, int] | None = None) -> None:
        """Keep the context of a step's rows, which the tap has seen.

        `stops`: by slot, the first position that is not verified; of the slots that it leaves out all rows
        are. Rows that the target layers have not seen (`SequenceRows.decoder_from`) leave nothing.
        """
        if tap.rows is None:
            return
        rows, ops = tap.rows, self._model.operations
        verified = [min(s.stop, (stops or {}).get(s.slot, s.stop)) for s in rows.sequences]
        stops_T = torch.tensor(verified, dtype=torch.int64)[rows.sequence_T]
        kept = (rows.positions_T < stops_T) & (rows.positions_T >= stops_T - cache.window)
        picked = kept.nonzero()[:, 0]
        if len(picked) == 0:
            return
        positions, sequence = rows.positions_T[picked], rows.sequence_T[picked]
        slots_S = torch.tensor([s.slot for s in rows.sequences], dtype=torch.int64)
        ring = slots_S[sequence] * cache.window + positions % cache.window
        projected = numerics.linear(ops, tap.entering(picked), (self._main,))[0]
        context_TC, angles = self._main_norm(ops, projected), self._table.angles(positions)
        for number, block in enumerate(self._blocks):
            entries = block.attention.entries(ops, context_TC, angles)
            cache.rings_BF[number, ring] = encode(ops, cache.record, entries)

    @torch.inference_mode()
    def propose(self, cache: DraftCache, anchors: Sequence[Anchor], pick: Pick = pick_likeliest) -> Proposal:
        """Drafts of several sequences, each of another slot. A sequence's bits depend on it alone."""
        assert len({a.slot for a in anchors}) == len(anchors) > 0, "a slot occurs twice in a draft"
        said_TC = self._run(cache, anchors)
        base_SRV = self._base(said_TC).view(len(anchors), self.num_rows, -1)
        said_SRC = said_TC.view(len(anchors), self.num_rows, -1)
        previous_S = torch.tensor([a.token_id for a in anchors])
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        sure: list[Tensor] = []
        for k in range(self.num_rows):
            markov_SM = self._markov_VM[previous_S]
            bias_SV = numerics.linear(self._model.operations, markov_SM, (self._markov,))[0]
            logits.append(base_SRV[:, k] + bias_SV)
            sure.append(self._confidence(said_SRC[:, k], markov_SM))
            previous_S = pick(k, logits[-1])
            tokens.append(previous_S)
        return Proposal(torch.stack(tokens, 1), torch.stack(logits, 1), torch.cat(sure, 1))

    def _run(self, cache: DraftCache, anchors: Sequence[Anchor]) -> Tensor:
        """[T, C]: anchor, noise, noise, ... through the blocks, collapsed."""
        ids_SR = torch.full((len(anchors), self.num_rows), self.config.dspark_noise_token_id)
        ids_SR[:, 0] = torch.tensor([a.token_id for a in anchors])
        plan = DraftPlan.of(anchors, self.num_rows, cache.window, self._table)
        stream = Stream.of(self._model.embed(ids_SR.flatten()), self.config.hc_mult)
        for block in self._blocks:
            stream = block(self._model.operations, stream, plan, cache)
        return stream.collapse()

    def _base(self, said_TC: Tensor) -> Tensor:
        return self._model.project(self._norm(self._model.operations, said_TC))

    def _confidence(self, said_SC: Tensor, markov_SM: Tensor) -> Tensor:
        """[S, 1]: sigmoid(proj [u; e])."""
        both = torch.cat((said_SC, markov_SM), 1)
        return numerics.sigmoid(numerics.linear(self._model.operations, both, (self._sure,))[0])


def _check(config: DeepseekConfig) -> None:
    """What drafts need beyond a config that is sound in itself."""
    targets, cut = config.dspark_target_layer_ids, cut_layer(config)
    for field in ("num_nextn_predict_layers", "dspark_block_size"):
        if getattr(config, field) < 1:
            raise refuse(
                f"text_config.{field}", getattr(config, field), "at least 1: this model cannot draft"
            )
    if config.dspark_block_size > ROLLBACK_ROWS:
        expected = f"at most {ROLLBACK_ROWS}, the rejected rows that a cache can roll back"
        raise refuse("text_config.dspark_block_size", config.dspark_block_size, expected)
    if targets[0] < 1 or targets[0] <= cut < targets[-1]:
        expected = f"layers from 1 on, all up to the decoder's first, {cut}, or all behind it"
        raise refuse("text_config.dspark_target_layer_ids", list(targets), expected)
