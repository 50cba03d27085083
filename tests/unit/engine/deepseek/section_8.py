"""DSpark as section 8 of the fact sheet says it, row by row in float64: nothing of the engine is in here.

R rows of a block, N = 4 streams, C channels, V vocabulary. Weights are float64 by released name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Drafted:
    """Of one anchor: tokens [R], logits [R, V], confidence [R]."""

    tokens: list[int]
    logits: Array
    confidence: Array


@dataclass(frozen=True)
class Section8:
    """`text` is the text config; `stored` what a window cache makes of an entry (section 3)."""

    text: Mapping[str, Any]
    w: Mapping[str, Array]
    stored: Callable[[Array], Array] = lambda entry: entry

    def context(self, entering: Sequence[Sequence[Array]]) -> list[Array]:
        """c of each token (8.1), from the streams [N, C] that enter each target layer, token by token."""
        found: list[Array] = []
        for streams in zip(*entering, strict=True):
            a = np.concatenate([stream.sum(0) / len(stream) for stream in streams])
            found.append(self._norm(self.w["mtp.0.main_proj.weight"] @ a, "mtp.0.main_norm"))
        return found

    def draft(self, context: Sequence[Array], anchor: int, said: Sequence[int] | None = None) -> Drafted:
        """Behind `context`, which has every token before the anchor (8.2, 8.3).

        `said`: what the drafts are taken to be, in place of the likeliest.
        """
        rows, last = self.text["dspark_block_size"], self.text["num_nextn_predict_layers"] - 1
        ids = [anchor, *[self.text["dspark_noise_token_id"]] * (rows - 1)]
        streams = [np.stack([self.w["embed.weight"][token]] * self.text["hc_mult"]) for token in ids]
        mixes = [np.eye(self.text["hc_mult"])[0] for _ in ids]
        for block in range(last + 1):
            at = f"mtp.{block}."
            attend = partial(self._attention, f"{at}attn.", context)
            streams, mixes = self._site(f"{at}hc_attn", f"{at}attn_norm", streams, mixes, attend)
            feed = partial(self._feed_forward, f"{at}ffn.")
            streams, mixes = self._site(f"{at}hc_ffn", f"{at}ffn_norm", streams, mixes, feed)
        previous, tokens, logits, confidence = anchor, [], [], []
        for k in range(rows):
            u = mixes[k] @ streams[k]
            base = self.w["head.weight"] @ self._norm(u, f"mtp.{last}.norm")
            e = self.w[f"mtp.{last}.markov_head.embed.weight"][previous]
            logits.append(base + self.w[f"mtp.{last}.markov_head.head.weight"] @ e)
            sure = self.w[f"mtp.{last}.confidence_head.proj.weight"] @ np.concatenate([u, e])
            confidence.append(_sigmoid(sure)[0])
            previous = int(np.argmax(logits[-1])) if said is None else said[k]
            tokens.append(previous)
        return Drafted(tokens, np.stack(logits), np.stack(confidence))

    def _attention(self, at: str, context: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
        """Every row sees the last window of the context and all rows of its block (8.2)."""
        start = len(context)
        first = max(start - self.text["sliding_window"], 0)
        entries = [self._entry(at, context[p], p) for p in range(first, start)]
        entries += [self._entry(at, x, start + k) for k, x in enumerate(xs)]
        return [self._mixed(at, x, start + k, entries) for k, x in enumerate(xs)]

    def _entry(self, at: str, x: Array, position: int) -> Array:
        return self.stored(self._turned(self._norm(self.w[f"{at}wkv.weight"] @ x, f"{at}kv_norm"), position))

    def _mixed(self, at: str, x: Array, position: int, entries: Sequence[Array]) -> Array:
        """One softmax with a sink, V turned back, groups of heads (2.1, 2.5)."""
        heads, width = self.text["num_attention_heads"], self.text["head_dim"]
        latent = self._norm(self.w[f"{at}wq_a.weight"] @ x, f"{at}q_norm")
        q = (self.w[f"{at}wq_b.weight"] @ latent).reshape(heads, width)
        outs: list[Array] = []
        for h in range(heads):
            turned = self._turned(q[h], position)
            scores = np.array([width**-0.5 * (turned @ entry) for entry in entries])
            weights = np.exp(scores)
            total = weights.sum() + np.exp(self.w[f"{at}attn_sink"][h])
            out = sum(weight * entry for weight, entry in zip(weights, entries, strict=True)) / total
            outs.append(self._turned(out, position, back=True))
        groups, rank = self.text["o_groups"], self.text["o_lora_rank"]
        by_group = np.concatenate(outs).reshape(groups, -1)
        wo_a = self.w[f"{at}wo_a.weight"].reshape(groups, rank, -1)
        return self.w[f"{at}wo_b.weight"] @ np.concatenate([wo_a[g] @ by_group[g] for g in range(groups)])

    def _turned(self, x: Array, position: int, back: bool = False) -> Array:
        """The last channels in pairs, by the plain table of ratio 0 (2.2)."""
        width, out = self.text["qk_rope_head_dim"], x.copy()
        for i in range(width // 2):
            angle = position * self.text["rope_theta"] ** (-2 * i / width) * (-1 if back else 1)
            even, odd = len(x) - width + 2 * i, len(x) - width + 2 * i + 1
            out[even] = x[even] * np.cos(angle) - x[odd] * np.sin(angle)
            out[odd] = x[odd] * np.cos(angle) + x[even] * np.sin(angle)
        return out

    def _feed_forward(self, at: str, xs: Sequence[Array]) -> list[Array]:
        return [self._experts(at, x) for x in xs]

    def _experts(self, at: str, x: Array) -> Array:
        """The draft's own experts and how many a row takes (section 6)."""
        scores = np.sqrt(np.log1p(np.exp(self.w[f"{at}gate.weight"] @ x)))
        order = np.argsort(-(scores + self.w[f"{at}gate.bias"]), kind="stable")
        chosen = order[: self.text["dspark_num_experts_per_tok"]]
        out = self._expert(f"{at}shared_experts.", x)
        for e in chosen:
            weight = self.text["routed_scaling_factor"] * scores[e] / scores[chosen].sum()
            out = out + weight * self._expert(f"{at}experts.{e}.", x)
        return out

    def _expert(self, at: str, x: Array) -> Array:
        limit = self.text["swiglu_limit"]
        gate = np.minimum(self.w[f"{at}w1.weight"] @ x, limit)
        up = np.clip(self.w[f"{at}w3.weight"] @ x, -limit, limit)
        return self.w[f"{at}w2.weight"] @ (gate * _sigmoid(gate) * up)

    def _site(
        self,
        at: str,
        norm: str,
        streams: Sequence[Array],
        mixes: Sequence[Array],
        sub_layer: Callable[[list[Array]], list[Array]],
    ) -> tuple[list[Array], list[Array]]:
        """Reads by the mix that is handed on, writes by the site's own coefficients (section 5)."""
        ys = sub_layer([self._norm(pi @ x, norm) for pi, x in zip(mixes, streams, strict=True)])
        found = [self._coefficients(at, x) for x in streams]
        spread = [
            np.outer(post, y) + mix.T @ x for (_, post, mix), y, x in zip(found, ys, streams, strict=True)
        ]
        return spread, [pre for pre, _, _ in found]

    def _coefficients(self, at: str, x: Array) -> tuple[Array, Array, Array]:
        n, eps, flat = self.text["hc_mult"], self.text["hc_eps"], x.reshape(-1)
        m = self.w[f"{at}_fn"] @ flat / np.sqrt((flat**2).mean() + self.text["rms_norm_eps"])
        base, scale = self.w[f"{at}_base"], self.w[f"{at}_scale"]
        pre = _sigmoid(scale[0] * m[:n] + base[:n]) + eps
        post = 2 * _sigmoid(scale[1] * m[n : 2 * n] + base[n : 2 * n])
        c = np.exp((scale[2] * m[2 * n :] + base[2 * n :]).reshape(n, n))
        c = c / c.sum(1, keepdims=True) + eps
        c = c / (c.sum(0, keepdims=True) + eps)
        for _ in range(self.text["hc_sinkhorn_iters"] - 1):
            c = c / (c.sum(1, keepdims=True) + eps)
            c = c / (c.sum(0, keepdims=True) + eps)
        return pre, post, c

    def _norm(self, x: Array, name: str) -> Array:
        return self.w[f"{name}.weight"] * x / np.sqrt((x**2).mean() + self.text["rms_norm_eps"])


def in_fp8(entry: Array) -> Array:
    """Section 3, "SWA FP8": E4M3 by groups of 32 with a power of two, nearest and ties to even."""
    out = np.empty_like(entry)
    for start in range(0, len(entry), 32):
        group = entry[start : start + 32]
        step = 2.0 ** np.ceil(np.log2(max(np.abs(group).max(), 1e-4) / 448))
        for i, x in enumerate(np.clip(group / step, -448, 448)):
            exponent = max(np.floor(np.log2(abs(x))), -6) if x else -6
            out[start + i] = np.round(x / 2.0 ** (exponent - 3)) * 2.0 ** (exponent - 3) * step
    return out


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
