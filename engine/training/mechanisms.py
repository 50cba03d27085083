"""The mechanisms of DeepSeek-V4.1 in a form that gradients pass: one full pass over whole sequences.

`engine/model/deepseek` computes the same function row by row for serving; a test holds the two together.
Sections are those of the fact sheet. Shapes: B sequences, T tokens, N = B * T rows, C channels, S = 4
streams, H heads, D channels a head, G compressed groups, W the window, E experts, K experts a token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.training.fast import fused

_SPAN = 128  # rows; a multiple of the window


def pieces(x: Tensor, sizes: Iterable[int]) -> Sequence[Tensor]:
    """Neighbouring parts of the first axis."""
    return torch.split(x, [*sizes])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Section 1: over the last axis."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of each position's angles, [T, D_rope / 2] (section 2.2)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, frequencies: Tensor, length: int) -> "Rotation":
        """Angles in float64, rounded once."""
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
        return cls(angles.cos().float(), angles.sin().float())

    def every(self, stride: int) -> "Rotation":
        """Of the first token of each group of `stride`."""
        return Rotation(self.cos[::stride], self.sin[::stride])

    def apply(self, x: Tensor, inverse: bool = False) -> Tensor:
        """Rotates adjacent pairs of the last channels; x is [B, T, D] or [B, T, H, D]."""
        width = 2 * self.cos.shape[1]
        shape = (1, -1, *(1,) * (x.dim() - 3), self.cos.shape[1])
        length = x.shape[1]
        cos, sin = self.cos[:length].view(shape), self.sin[:length].view(shape)
        sin = -sin if inverse else sin
        plain, turned = x[..., :-width], x[..., -width:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return torch.cat((plain, pairs.flatten(-2)), -1)


@dataclass(frozen=True, slots=True)
class Site:
    """The weights of one mixing: of the attention or the experts of a layer."""

    fn: Tensor  # [S (2 + S), S C]
    base: Tensor
    scale: Tensor  # [3]

    @classmethod
    def of(cls, parameters: dict[str, Tensor], name: str) -> "Site":
        return cls(parameters[f"{name}_fn"], parameters[f"{name}_base"], parameters[f"{name}_scale"])


@fused
def mixing(
    x_NSC: Tensor, site: Site, *, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A site's coefficients: pre [N, S] for the next site, post [N, S], residual mix [N, S, S] (section 5).

    Rows stand last while they are worked on: sums over the four streams are then sums of long vectors.
    """
    n, streams, _ = x_NSC.shape
    flat = x_NSC.flatten(1)
    statistic = torch.rsqrt(flat.square().mean(-1) + norm_eps)
    m = (site.fn @ flat.T) * statistic
    sizes = (streams, streams, streams * streams)
    pre, post, residual = pieces(m, sizes)
    pre_base, post_base, residual_base = pieces(site.base.unsqueeze(1), sizes)
    pre = torch.sigmoid(site.scale[0] * pre + pre_base) + eps
    post = 2.0 * torch.sigmoid(site.scale[1] * post + post_base)
    mix = torch.softmax((site.scale[2] * residual + residual_base).view(streams, streams, n), 1) + eps
    mix = mix / (mix.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        mix = mix / (mix.sum(0, keepdim=True) + eps)
    return pre.T.contiguous(), post.T.contiguous(), mix.permute(2, 0, 1).contiguous()


@fused
def collapse(x_NSC: Tensor, pre_NS: Tensor) -> Tensor:
    """A sub-layer's input, [N, C]."""
    return (pre_NS.unsqueeze(-1) * x_NSC).sum(1)


@fused
def spread(x_NSC: Tensor, y_NC: Tensor, post_NS: Tensor, mix_NSS: Tensor) -> Tensor:
    """The streams after a sub-layer gave y: X'_k = post_k y + sum over j of mix[j, k] X_j."""
    return torch.baddbmm(post_NS.unsqueeze(-1) * y_NC.unsqueeze(1), mix_NSS.transpose(1, 2), x_NSC)


def window_blocks(kv_BTD: Tensor, window: int) -> Tensor:
    """For each run of W rows the entries that they see: [B, T / W, 2 W, D], the run before's and its."""
    batch, length, width = kv_BTD.shape
    padded = F.pad(kv_BTD, (0, 0, window, 0)).view(batch, length // window + 1, window, width)
    return torch.cat((padded[:, :-1], padded[:, 1:]), 2)


def window_mask(length: int, window: int, lower_B: Tensor | None) -> Tensor:
    """True where row w of a run may see entry 2 W wide: [B or 1, T / W, W, 2 W] (section 2.5).

    `lower_B`: a position for each sequence below which rows at or after it see nothing (section 1.3).
    """
    row = torch.arange(length).view(-1, window, 1)
    entry = (torch.arange(length).view(-1, window)[:, :1] - window).unsqueeze(1) + torch.arange(2 * window)
    seen = (entry <= row) & (entry > row - window) & (entry >= 0)
    if lower_B is None:
        return seen.unsqueeze(0)
    lower = lower_B.view(-1, 1, 1, 1)
    return seen.unsqueeze(0) & ((entry.unsqueeze(0) >= lower) | (row.unsqueeze(0) < lower))


def visible(length: int, ratio: int) -> Tensor:
    """True where row p may see group j: [T, G], j < floor((p + 1) / ratio) (section 2.4)."""
    groups = length // ratio
    return torch.arange(groups) < ((torch.arange(length) + 1) // ratio).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Near:
    """Window entries of each run of rows, and which of them a row sees."""

    entries: Tensor  # [B, T / W, 2 W, D]
    mask: Tensor  # [B or 1, T / W, W, 2 W]


@dataclass(frozen=True, slots=True)
class Far:
    """Compressed groups, and which of them a row sees."""

    groups: Tensor  # [B, G, D]
    mask: Tensor  # [B or 1, T, G]


def attend(q_BTHD: Tensor, near: Near, far: Far | None, sinks_H: Tensor) -> tuple[Tensor, Tensor | None]:
    """Window and groups under one softmax with a sink (section 2.5).

    Returns [B, T, H, D], and what each group got, summed over the heads: [B, T, G]. Spans of rows go one
    after another: later groups than a span can see cost nothing.
    """
    if far is None:
        return _attend_window(q_BTHD, near, sinks_H), None
    (length, groups), runs = far.mask.shape[1:], near.entries.shape[1]
    outs: list[Tensor] = []
    shares: list[Tensor] = []
    for rows, seen in spans(length, groups):
        window = length // runs
        of_span = slice(rows.start // window, rows.stop // window)
        out, got = _attend_both(
            q_BTHD[:, rows],
            Near(near.entries[:, of_span], near.mask[:, of_span]),
            Far(far.groups[:, :seen], far.mask[:, rows, :seen]),
            sinks_H,
        )
        outs.append(out)
        shares.append(F.pad(got, (0, groups - seen)))
    return torch.cat(outs, 1), torch.cat(shares, 1)


def spans(length: int, groups: int) -> Iterator[tuple[slice, int]]:
    """Runs of rows, and how many of the groups the last row of each may see."""
    for start in range(0, length, _SPAN):
        end = min(start + _SPAN, length)
        yield slice(start, end), groups * end // length


def _window_logits(q_BTHD: Tensor, near: Near) -> Tensor:
    batch, length, heads, width = q_BTHD.shape
    runs, reach = near.entries.shape[1:3]
    logits = (q_BTHD.reshape(batch, runs, -1, width) @ near.entries.mT).view(batch, runs, -1, heads, reach)
    return logits.masked_fill(~near.mask.unsqueeze(3), -torch.inf).reshape(batch, length, heads, reach)


@fused
def _attend_window(q_BTHD: Tensor, near: Near, sinks_H: Tensor) -> Tensor:
    batch, length, heads, width = q_BTHD.shape
    runs, reach = near.entries.shape[1:3]
    logits = _window_logits(q_BTHD * width**-0.5, near)
    sinks = sinks_H.view(1, 1, -1, 1).expand(batch, length, heads, 1)
    weights = torch.softmax(torch.cat((logits, sinks), -1), -1)
    return (weights[..., :reach].reshape(batch, runs, -1, reach) @ near.entries).view(q_BTHD.shape)


@fused
def _attend_both(q_BTHD: Tensor, near: Near, far: Far, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = q_BTHD.shape
    runs, reach = near.entries.shape[1:3]
    q = q_BTHD * width**-0.5
    logits = (q.reshape(batch, length * heads, width) @ far.groups.mT).view(batch, length, heads, -1)
    parts = (
        _window_logits(q, near),
        logits.masked_fill(~far.mask.unsqueeze(2), -torch.inf),
        sinks_H.view(1, 1, -1, 1).expand(batch, length, heads, 1),
    )
    weights = torch.softmax(torch.cat(parts, -1), -1)
    out = (weights[..., :reach].reshape(batch, runs, -1, reach) @ near.entries).view(q_BTHD.shape)
    shares = weights[..., reach:-1]
    out = out + (shares.reshape(batch, length * heads, -1) @ far.groups).view(q_BTHD.shape)
    return out, shares.detach().sum(2)


def index_scores(q_BTHD: Tensor, weights_BTH: Tensor, keys_BGD: Tensor) -> Tensor:
    """How much row p wants group j: [B, T, G] (section 2.4). Zero where p is before j's span of rows."""
    length, groups = q_BTHD.shape[1], keys_BGD.shape[1]
    scored = [
        F.pad(_index_scores(q_BTHD[:, rows], weights_BTH[:, rows], keys_BGD[:, :seen]), (0, groups - seen))
        for rows, seen in spans(length, groups)
    ]
    return torch.cat(scored, 1)


@fused
def _index_scores(q_BTHD: Tensor, weights_BTH: Tensor, keys_BGD: Tensor) -> Tensor:
    batch, length, heads, width = q_BTHD.shape
    raw = (q_BTHD.reshape(batch, length * heads, width) @ keys_BGD.mT).relu()
    scaled = weights_BTH * (heads**-0.5 * width**-0.5)
    return (scaled.unsqueeze(-1) * raw.view(batch, length, heads, -1)).sum(2)


def choose_groups(scores_BTG: Tensor, mask: Tensor, count: int) -> Tensor:
    """True for each row's `count` best visible groups: [B, T, G]. Ties are open: training has none."""
    if scores_BTG.shape[-1] <= count:
        return mask.expand_as(scores_BTG)
    masked = scores_BTG.detach().masked_fill(~mask, -torch.inf)
    order = masked.topk(count, -1, sorted=False).indices
    chosen = torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & mask


def candidate_mask(scores_BTG: Tensor, mask: Tensor, block: int, count: int) -> Tensor:
    """True for the groups in each row's `count` best blocks, the newest among them: [B, T, G]."""
    batch, length, groups = scores_BTG.shape
    masked = scores_BTG.detach().masked_fill(~mask, -torch.inf)
    padded = F.pad(masked, (0, -groups % block), value=-torch.inf).view(batch, length, -1, block)
    best = padded.amax(-1)
    newest = mask.sum(-1).sub(1).clamp_min(0) // block
    has_any = mask.any(-1)
    pinned = F.one_hot(newest, best.shape[-1]).bool() & has_any.unsqueeze(-1)
    best = best.masked_fill(pinned, torch.inf)
    order = best.topk(min(count, best.shape[-1]), -1, sorted=False).indices
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, order, True) & (best > -torch.inf)
    return chosen.repeat_interleave(block, -1)[..., :groups]


@dataclass(frozen=True, slots=True)
class Routing:
    """Each row's experts [N, K], their weights [N, K], and all scores [N, E]."""

    experts: Tensor
    weights: Tensor
    scores: Tensor


def route(x_NC: Tensor, gate: Tensor, bias_E: Tensor, *, count: int, scaling: float) -> Routing:
    """Section 6: chosen with the bias, weighed without it."""
    scores = F.softplus(x_NC @ gate.T).sqrt()
    experts = (scores.detach() + bias_E).topk(count, -1).indices
    picked = scores.gather(1, experts)
    return Routing(experts, scaling * picked / (picked.sum(-1, keepdim=True) + 1e-20), scores)


@dataclass(frozen=True, slots=True)
class Experts:
    """The three matrices of an expert, or of a layer's, stacked."""

    w1: Tensor
    w2: Tensor
    w3: Tensor

    @classmethod
    def of(cls, parameters: dict[str, Tensor], name: str, rounded: Callable[[Tensor], Tensor]) -> "Experts":
        return cls(*(rounded(parameters[f"{name}{matrix}"]) for matrix in ("w1", "w2", "w3")))

    def each(self) -> "list[Experts]":
        return [Experts(*of) for of in zip(self.w1, self.w2, self.w3, strict=True)]


def swiglu(x: Tensor, expert: Experts, limit: float) -> Tensor:
    """One expert, its gate clamped from above and its other side from both (section 6)."""
    gate = (x @ expert.w1.T).clamp(max=limit)
    up = (x @ expert.w3.T).clamp(-limit, limit)
    return (F.silu(gate) * up) @ expert.w2.T


def mixture(x_NC: Tensor, routing: Routing, experts: Experts, limit: float) -> Tensor:
    """The sum of each row's experts, [N, C]."""
    slots = routing.experts.shape[1]
    order = routing.experts.flatten().argsort(stable=True)
    counts = torch.bincount(routing.experts.flatten(), minlength=len(experts.w1))
    rows = x_NC[order // slots]
    parts = [
        swiglu(part, expert, limit)
        for part, expert in zip(pieces(rows, map(int, counts)), experts.each(), strict=True)
    ]
    weighed = torch.cat(parts) * routing.weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x_NC).index_add(0, order // slots, weighed)


@fused
def engram_gate(x_NSC: Tensor, keys_NSC: Tensor, weight_SC: Tensor, eps: float) -> Tensor:
    """How much of a row's n-grams each stream takes: [N, S] (section 7.3). `weight`: of query and key."""
    dot = (x_NSC * weight_SC * keys_NSC).sum(-1)
    rho = dot * torch.rsqrt(x_NSC.square().mean(-1) + eps) * torch.rsqrt(keys_NSC.square().mean(-1) + eps)
    rho = rho * x_NSC.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(rho.abs().clamp_min(1e-6).sqrt(), rho))
