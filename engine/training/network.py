"""nano's full pass over whole sequences, with gradients: what `engine/model/deepseek` computes, in training.

B sequences, T tokens, N = B * T rows, C channels, S streams, H heads, D channels a head, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.roles import LayerRole, cut_layer, layer_roles
from engine.model.deepseek.rope import plain_frequencies, yarn_frequencies
from engine.training.mechanisms import (
    Experts,
    Far,
    Near,
    Rotation,
    Site,
    attend,
    candidate_mask,
    choose_groups,
    collapse,
    engram_gate,
    index_scores,
    mixing,
    mixture,
    rms_norm,
    route,
    spread,
    swiglu,
    visible,
    window_blocks,
    window_mask,
)
from engine.training.parameters import Parameters

Round = Callable[[Tensor], Tensor]
"""Rounds values to what a format holds, and lets gradients through as if it had not."""


def exactly(x: Tensor) -> Tensor:
    """No rounding."""
    return x


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the released formats make of caches and expert weights; `exactly` until the last part."""

    window: Round = exactly
    main: Round = exactly
    index: Round = exactly
    experts: Round = exactly


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

    rounding: Rounding = Rounding()
    sparse: bool = False
    learn_index: bool = False


@dataclass(slots=True)
class Findings:
    """What a pass leaves beside its logits."""

    index_losses: list[Tensor] = field(default_factory=list[Tensor])  # one an index source
    recalls: list[Tensor] = field(default_factory=list[Tensor])  # attention that the chosen groups got
    balance: list[Tensor] = field(default_factory=list[Tensor])  # one a layer
    loads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # rows an expert, by layer
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
        self.cut = cut_layer(network.config)
        self.groups = self.keys = self.chosen = self.candidates = None

    def run(self) -> tuple[Tensor, Findings]:
        c = self.config
        embedded = self.p["embed.weight"][self.batch.ids].flatten(0, 1)
        x_NSC = embedded.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        pre_NS = torch.zeros(len(embedded), c.hc_mult)
        pre_NS[:, 0] = 1.0
        for layer in range(c.num_hidden_layers):
            if layer in c.dspark_target_layer_ids:
                self.found.streams[layer] = x_NSC.detach().mean(1)
            if layer in c.engram_layer_ids:
                x_NSC = self._engram(layer, x_NSC)
            x_NSC, pre_NS = self._site(layer, "attn", x_NSC, pre_NS)
            x_NSC, pre_NS = self._site(layer, "ffn", x_NSC, pre_NS)
        hidden = rms_norm(collapse(x_NSC, pre_NS), self.p["norm.weight"], c.rms_norm_eps)
        return hidden.view(*self.batch.ids.shape, -1), self.found

    def _site(self, layer: int, site: str, x_NSC: Tensor, pre_NS: Tensor) -> tuple[Tensor, Tensor]:
        """A sub-layer between its mixings; what it collapses by comes from the site before."""
        c, at = self.config, f"layers.{layer}."
        pre, post, mix = mixing(
            x_NSC, Site.of(self.p, f"{at}hc_{site}"),
            iterations=c.hc_sinkhorn_iters, norm_eps=c.rms_norm_eps, eps=c.hc_eps,
        )  # fmt: skip
        y_NC = rms_norm(collapse(x_NSC, pre_NS), self.p[f"{at}{site}_norm.weight"], c.rms_norm_eps)
        y_NC = self._attention(layer, y_NC) if site == "attn" else self._feed_forward(at, y_NC)
        return spread(x_NSC, y_NC, post, mix), pre

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.p[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.p[f"{name}.weight"], self.config.rms_norm_eps)

    def _engram(self, layer: int, x_NSC: Tensor) -> Tensor:
        c, at = self.config, f"layers.{layer}.engram."
        looked_up = self.p[f"{at}embed.weight"][self.batch.engram_rows[layer]].flatten(1)
        projected = self._linear(looked_up, f"{at}wkv").view(len(x_NSC), c.hc_mult + 1, -1)
        keys, value = projected[:, :-1], projected[:, -1:]
        weight = self.p[f"{at}q_weight"] * self.p[f"{at}k_weight"]
        return x_NSC + engram_gate(x_NSC, keys, weight, c.rms_norm_eps).unsqueeze(-1) * value

    def _attention(self, layer: int, x_NC: Tensor) -> Tensor:
        c, at, role = self.config, f"layers.{layer}.attn.", self.network.roles[layer]
        x_BTC = x_NC.view(*self.batch.ids.shape, -1)
        rotation = self.network.scaled if role.ratio else self.network.plain
        latent = self._norm(self._linear(x_BTC, f"{at}wq_a"), f"{at}q_norm")
        q = self._linear(latent, f"{at}wq_b").view(*self.batch.ids.shape, c.num_attention_heads, -1)
        kv = self._norm(self._linear(x_BTC, f"{at}wkv"), f"{at}kv_norm")
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
            self._learn_index(scores, shares, far.mask)
        out = rotation.apply(out, inverse=True).reshape(*self.batch.ids.shape, c.o_groups, -1)
        by_group = self.p[f"{at}wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        low = torch.einsum("btgi,goi->btgo", out, by_group).flatten(2)
        return self._linear(low, f"{at}wo_b").flatten(0, 1)

    def _lower(self, layer: int) -> Tensor | None:
        """Decoder layers past the cut see windows of a span's last rows alone."""
        if self.batch.span_ends is None or layer <= self.cut:
            return None
        return (self.batch.span_ends - self.config.sliding_window).clamp_min(0)

    def _compress(self, at: str, x_BTC: Tensor, ratio: int) -> None:
        c = self.config
        pooled = self._linear(x_BTC, f"{at}compressor.wkv")
        if ratio > 1:
            shape = (len(x_BTC), -1, ratio, c.head_dim)
            gate = self._linear(x_BTC, f"{at}compressor.wgate").view(shape)
            pooled = (torch.softmax(gate, 2) * pooled.view(shape)).sum(2)
        latent = self._norm(pooled, f"{at}compressor.norm")
        rotation = self.network.scaled.every(ratio)
        self.groups = self.mode.rounding.main(rotation.apply(latent))
        keys = self._norm(self._linear(latent.detach(), f"{at}indexer.wk"), f"{at}indexer.k_norm")
        self.keys = self.mode.rounding.index(rotation.apply(keys))

    def _choose(self, role: LayerRole, x_BTC: Tensor, latent: Tensor, seen: Tensor) -> Tensor:
        """The indexer, whose inputs get no gradient: it learns from the attention that it imitates."""
        c, at = self.config, f"layers.{role.layer}.attn.indexer."
        q = self._linear(latent.detach(), f"{at}wq_b").view(*self.batch.ids.shape, c.index_n_heads, -1)
        q = self.mode.rounding.index(self.network.scaled.apply(q))
        assert self.keys is not None, "an index source comes after its keys"
        scores = index_scores(q, self._linear(x_BTC.detach(), f"{at}weights_proj"), self.keys)
        allowed = seen
        if role.makes_candidates:
            self.candidates = candidate_mask(scores, seen, c.candidate_block_size, c.candidate_topk_blocks)
        elif role.uses_candidates and self.candidates is not None:
            allowed = seen & self.candidates
        self.chosen = choose_groups(scores, allowed, c.index_topk)
        return scores

    def _learn_index(self, scores: Tensor, shares: Tensor, mask: Tensor) -> None:
        """KL from the attention over the groups to the scores' softmax (section 13)."""
        total = shares.sum(-1, keepdim=True)
        target = shares / total.clamp_min(1e-9)
        rows = (mask.sum(-1) > 1).expand(shares.shape[:2]) & (total.squeeze(-1) > 1e-6)
        expected = torch.log_softmax(scores.masked_fill(~mask, -1e9), -1)
        divergence = (target * (target.clamp_min(1e-9).log() - expected)).sum(-1)
        self.found.index_losses.append(divergence[rows].mean())
        if self.chosen is not None:
            self.found.recalls.append((target * self.chosen).sum(-1)[rows].mean().detach())

    def _feed_forward(self, at: str, x_NC: Tensor) -> Tensor:
        c = self.config
        routing = route(
            x_NC, self.p[f"{at}ffn.gate.weight"], self.p[f"{at}ffn.gate.bias"],
            count=c.num_experts_per_tok, scaling=c.routed_scaling_factor,
        )  # fmt: skip
        load = torch.bincount(routing.experts.flatten(), minlength=c.n_routed_experts).float()
        self.found.loads[at] = load
        share = (routing.scores / routing.scores.sum(-1, keepdim=True)).mean(0)
        self.found.balance.append((share * load / load.mean()).sum())
        stacks = Experts.of(self.p, f"{at}ffn.experts.", self.mode.rounding.experts)
        own = Experts(*(self.p[f"{at}ffn.shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")))
        return mixture(x_NC, routing, stacks, c.swiglu_limit) + swiglu(x_NC, own, c.swiglu_limit)
