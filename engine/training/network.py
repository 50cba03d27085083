"""nano's full pass over whole sequences, with gradients: what `engine/model/deepseek` computes, in training.

B sequences, T tokens, N = B * T rows, C channels, S streams, H heads, D channels a head, G groups.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.roles import LayerRole, cut_layer, layer_roles
from engine.model.deepseek.rope import plain_frequencies, yarn_frequencies
from engine.training.mechanisms import (
    Far,
    Near,
    Rotation,
    attend,
    candidate_mask,
    choose_groups,
    engram_gate,
    index_scores,
    visible,
    window_blocks,
    window_mask,
)
from engine.training.parameters import Parameters
from engine.training.sublayers import Balance, Rounding, Streams, SubLayers


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs, and what depends on them alone."""

    ids: Tensor  # int64 [B, T]
    engram_rows: dict[int, Tensor]  # by layer: int64 [N, orders * heads]
    span_ends: Tensor | None = (
        None  # [B] prompt lengths: decoder layers replay a window of each (section 1.3)
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """`sparse`: attention over the indexer's choice instead of all groups."""

    rounding: Rounding = Rounding()  # noqa: RUF009 - frozen
    sparse: bool = False
    learn_index: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Of an index source: the attention that its choice gets, and that the best choice of as many would.

    Summed over the rows that see more groups than they may choose.
    """

    layer: int
    got: float
    best: float


@dataclass(slots=True)
class Findings:
    """What a pass leaves beside its logits."""

    index_losses: list[Tensor] = field(default_factory=list[Tensor])  # one an index source
    recalls: list[Recall] = field(default_factory=list[Recall])  # of a pass without gradients
    balance: Balance = field(default_factory=Balance)
    streams: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # entering a draft's target layers


@dataclass(frozen=True, slots=True)
class Network:
    """The shape and its rotations. Holds no weights."""

    config: DeepseekConfig
    roles: tuple[LayerRole, ...]
    plain: Rotation  # of window layers
    scaled: Rotation  # of layers that read groups

    @classmethod
    def of(cls, config: DeepseekConfig, length: int) -> "Network":
        """For sequences of up to `length` tokens."""
        base, channels, yarn = config.compress_rope_theta, config.qk_rope_head_dim, config.rope_scaling
        scaled = plain_frequencies(base, channels) if yarn is None else yarn_frequencies(base, channels, yarn)
        plain = plain_frequencies(config.rope_theta, channels)
        return cls(config, layer_roles(config), Rotation.of(plain, length), Rotation.of(scaled, length))

    def forward(self, p: Parameters, batch: Batch, mode: Mode) -> tuple[Tensor, Findings]:
        """Hidden states before the head, [B, T, C], and findings."""
        return _Pass(self, p, batch, mode).run()


class _Pass:
    """One pass, and what its layers leave for later ones: the last groups, keys and choices."""

    def __init__(self, network: Network, p: Parameters, batch: Batch, mode: Mode) -> None:
        self.network, self.config, self.p, self.batch, self.mode = network, network.config, p, batch, mode
        self.found = Findings()
        self.of = SubLayers(network.config, p, mode.rounding, self.found.balance)
        self.cut = cut_layer(network.config)
        self.groups = self.keys = self.chosen = self.candidates = None

    def run(self) -> tuple[Tensor, Findings]:
        c = self.config
        streams = Streams.of(self.p["embed.weight"][self.batch.ids].flatten(0, 1), c.hc_mult)
        for layer in range(c.num_hidden_layers):
            at = f"layers.{layer}."
            if layer in c.dspark_target_layer_ids:
                self.found.streams[layer] = streams.x.detach().mean(1)
            if layer in c.engram_layer_ids:
                streams = self._engram(layer, streams)
            streams = self.of.site(at, "attn", streams, partial(self._attention, layer))
            streams = self.of.site(at, "ffn", streams, partial(self._feed_forward, at))
        hidden = self.of.norm(streams.collapsed(), "norm")
        return hidden.view(*self.batch.ids.shape, -1), self.found

    def _feed_forward(self, at: str, x_NC: Tensor) -> Tensor:
        return self.of.feed_forward(at, x_NC, self.config.num_experts_per_tok, len(self.batch.ids))

    def _engram(self, layer: int, streams: Streams) -> Streams:
        c, at = self.config, f"layers.{layer}.engram."
        looked_up = self.p[f"{at}embed.weight"][self.batch.engram_rows[layer]].flatten(1)
        projected = self.of.linear(looked_up, f"{at}wkv").view(len(looked_up), c.hc_mult + 1, -1)
        keys, value = projected[:, :-1], projected[:, -1:]
        weight = self.p[f"{at}q_weight"] * self.p[f"{at}k_weight"]
        gate = engram_gate(streams.x, keys, weight, c.rms_norm_eps)
        return Streams(streams.x + gate.unsqueeze(-1) * value, streams.pre)

    def _attention(self, layer: int, x_NC: Tensor) -> Tensor:
        c, at, role = self.config, f"layers.{layer}.attn.", self.network.roles[layer]
        x_BTC = x_NC.view(*self.batch.ids.shape, -1)
        rotation = self.network.scaled if role.ratio else self.network.plain
        latent = self.of.norm(self.of.linear(x_BTC, f"{at}wq_a"), f"{at}q_norm")
        q = self.of.linear(latent, f"{at}wq_b").view(*self.batch.ids.shape, c.num_attention_heads, -1)
        kv = self.of.norm(self.of.linear(x_BTC, f"{at}wkv"), f"{at}kv_norm")
        kv = self.mode.rounding.window(rotation.apply(kv))
        length = x_BTC.shape[1]
        near = Near(
            window_blocks(kv, c.sliding_window), window_mask(length, c.sliding_window, self._lower(layer))
        )
        far, scores = None, None
        if role.ratio:
            if role.owns_entries:
                self._compress(f"{at}", x_BTC, role.ratio)
            seen = visible(length, role.ratio).unsqueeze(0)
            if role.owns_selection and (self.mode.sparse or self.mode.learn_index):
                scores = self._choose(role, x_BTC, latent, seen)
            assert self.groups is not None, "a layer that reads groups comes after their source"
            chosen = self.chosen if self.mode.sparse else None
            far = Far(self.groups, seen if chosen is None else chosen)
        out, shares = attend(rotation.apply(q), near, far, self.p[f"{at}attn_sink"])
        if self.mode.learn_index and scores is not None and shares is not None and far is not None:
            self._learn_index(layer, scores, shares, far.mask)
        return self.of.grouped_output(at, rotation.apply(out, inverse=True).flatten(0, 1).flatten(1))

    def _lower(self, layer: int) -> Tensor | None:
        """Decoder layers past the cut see windows of a span's last rows alone."""
        if self.batch.span_ends is None or layer <= self.cut:
            return None
        return (self.batch.span_ends - self.config.sliding_window).clamp_min(0)

    def _compress(self, at: str, x_BTC: Tensor, ratio: int) -> None:
        c = self.config
        pooled = self.of.linear(x_BTC, f"{at}compressor.wkv")
        if ratio > 1:
            shape = (len(x_BTC), -1, ratio, c.head_dim)
            gate = self.of.linear(x_BTC, f"{at}compressor.wgate").view(shape)
            pooled = (torch.softmax(gate, 2) * pooled.view(shape)).sum(2)
        latent = self.of.norm(pooled, f"{at}compressor.norm")
        rotation = self.network.scaled.every(ratio)
        self.groups = self.mode.rounding.main(rotation.apply(latent))
        keys = self.of.norm(self.of.linear(latent.detach(), f"{at}indexer.wk"), f"{at}indexer.k_norm")
        self.keys = self.mode.rounding.index(rotation.apply(keys))

    def _choose(self, role: LayerRole, x_BTC: Tensor, latent: Tensor, seen: Tensor) -> Tensor:
        """The indexer, whose inputs get no gradient: it learns from the attention that it imitates."""
        c, at = self.config, f"layers.{role.layer}.attn.indexer."
        q = self.of.linear(latent.detach(), f"{at}wq_b").view(*self.batch.ids.shape, c.index_n_heads, -1)
        q = self.mode.rounding.index(self.network.scaled.apply(q))
        assert self.keys is not None, "an index source comes after its keys"
        scores = index_scores(q, self.of.linear(x_BTC.detach(), f"{at}weights_proj"), self.keys)
        allowed = seen
        if role.makes_candidates:
            self.candidates = candidate_mask(scores, seen, c.candidate_block_size, c.candidate_topk_blocks)
        elif role.uses_candidates and self.candidates is not None:
            allowed = seen & self.candidates
        self.chosen = choose_groups(scores, allowed, c.index_topk)
        return scores

    def _learn_index(self, layer: int, scores: Tensor, shares: Tensor, mask: Tensor) -> None:
        """KL from the attention over the groups to the scores' softmax (section 13)."""
        total = shares.sum(-1, keepdim=True)
        target = shares / total.clamp_min(1e-9)
        rows = (mask.sum(-1) > 1).expand(shares.shape[:2]) & (total.squeeze(-1) > 1e-6)
        expected = torch.log_softmax(scores.masked_fill(~mask, -1e9), -1)
        divergence = (target * (target.clamp_min(1e-9).log() - expected)).sum(-1)
        self.found.index_losses.append(divergence[rows].mean())
        if self.chosen is not None and not torch.is_grad_enabled():
            count = self.config.index_topk
            chose = (mask.sum(-1) > count).expand_as(rows) & rows
            best = target[chose].topk(min(count, target.shape[-1]), -1).values
            got = (target * self.chosen)[chose]
            self.found.recalls.append(Recall(layer, float(got.sum()), float(best.sum())))
