"""DSpark in training: the drafts learn what the frozen backbone would say next (fact sheet, section 8).

Anchors are positions spread over each sequence; from each, one parallel pass drafts a block. A anchors,
R rows a block, W the window, N = B * A * R rows.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.deepseek.config import DeepseekConfig
from engine.training.mechanisms import Rotation
from engine.training.network import Network
from engine.training.parameters import Draw, Named, Parameters, draft_block
from engine.training.sublayers import Balance, Rounding, Streams, SubLayers


def initial_drafts(config: DeepseekConfig, seed: int) -> Parameters:
    """Random weights of `mtp.*`, under the released names."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=noise) * (gain / math.sqrt(shape[-1]))

    return dict(_drafts(config, matrix))


def _drafts(config: DeepseekConfig, matrix: Draw) -> Named:
    c, rank, last = config.hidden_size, config.dspark_markov_rank, config.num_nextn_predict_layers - 1
    yield "mtp.0.main_proj.weight", matrix(c, c * len(config.dspark_target_layer_ids))
    yield "mtp.0.main_norm.weight", torch.ones(c)
    for block in range(config.num_nextn_predict_layers):
        for name, tensor in draft_block(config, matrix):
            yield f"mtp.{block}.{name}", tensor
    yield f"mtp.{last}.norm.weight", torch.ones(c)
    yield f"mtp.{last}.markov_head.embed.weight", matrix(config.vocab_size, rank)
    yield f"mtp.{last}.markov_head.head.weight", matrix(config.vocab_size, rank, gain=0.1)
    yield f"mtp.{last}.confidence_head.proj.weight", matrix(1, c + rank, gain=0.1)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a pass says of each anchor's rows. Row k drafts the token k + 1 behind the anchor."""

    logits: Tensor  # [B, A, R, V]
    confidence: Tensor  # [B, A, R], before the sigmoid


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where drafts begin, and the tokens that the Markov head takes as drawn so far."""

    positions: Tensor  # int64 [B, A]
    ids: Tensor  # int64 [B, A], the tokens there
    previous: Tensor  # int64 [B, A, R]; the first is the anchor's


class DraftPass:
    """One pass over anchors. `p` holds the backbone's embedding and head too."""

    def __init__(
        self, network: Network, p: Parameters, rounding: Rounding, streams: dict[int, Tensor]
    ) -> None:
        self.config, self.p, self.rounding = network.config, p, rounding
        self.rotation: Rotation = network.plain
        self.balance = Balance()
        self.of = SubLayers(network.config, p, rounding, self.balance)
        self._entering = torch.cat([streams[layer] for layer in self.config.dspark_target_layer_ids], -1)
        self.last = f"mtp.{self.config.num_nextn_predict_layers - 1}."

    def run(self, anchors: Anchors) -> Drafts:
        c = self.config
        shape = (*anchors.positions.shape, c.dspark_block_size)
        context = self.of.norm(self.of.linear(self._entering, "mtp.0.main_proj"), "mtp.0.main_norm")
        context = context.view(len(anchors.ids), -1, c.hidden_size)
        ids = torch.full(shape, c.dspark_noise_token_id)
        ids[..., 0] = anchors.ids
        streams = Streams.of(self.p["embed.weight"][ids].view(-1, c.hidden_size), c.hc_mult)
        for block in range(c.num_nextn_predict_layers):
            at = f"mtp.{block}."
            attend = partial(self._attention, at, context, anchors.positions)
            streams = self.of.site(at, "attn", streams, attend)
            feed = partial(
                self.of.feed_forward, at, count=c.dspark_num_experts_per_tok, sequences=len(anchors.ids)
            )
            streams = self.of.site(at, "ffn", streams, feed)
        said_NC = streams.collapsed()
        base = self.of.norm(said_NC, f"{self.last}norm") @ self.p["head.weight"].T
        markov = self.p[f"{self.last}markov_head.embed.weight"][anchors.previous].flatten(0, 2)
        logits = base + self.of.linear(markov, f"{self.last}markov_head.head")
        sure = self.of.linear(torch.cat((said_NC, markov), -1).detach(), f"{self.last}confidence_head.proj")
        return Drafts(logits.view(*shape, -1), sure.view(shape))

    def _attention(self, at: str, context_BTC: Tensor, positions_BA: Tensor, x_NC: Tensor) -> Tensor:
        """Every row sees the window before its anchor and all rows of its block (section 8.2)."""
        c, at = self.config, f"{at}attn."
        batch, count = positions_BA.shape
        rows = c.dspark_block_size
        places = positions_BA.unsqueeze(2) + torch.arange(rows)
        latent = self.of.norm(self.of.linear(x_NC, f"{at}wq_a"), f"{at}q_norm")
        q = self.of.linear(latent, f"{at}wq_b").view(batch, count, rows, c.num_attention_heads, -1)
        q = self._turned(q, places)
        own = self._entries(at, x_NC.view(batch, count, rows, -1), places)
        window = positions_BA.unsqueeze(2) - c.sliding_window + torch.arange(c.sliding_window)
        every = torch.arange(context_BTC.shape[1]).expand(batch, -1)
        past = self._entries(at, context_BTC, every)
        taken = window.clamp_min(0).flatten(1).unsqueeze(2).expand(-1, -1, c.head_dim)
        past = past.gather(1, taken).view(batch, count, c.sliding_window, -1)
        entries = torch.cat((past, own), 2)
        seen = torch.cat((window >= 0, torch.ones(batch, count, rows, dtype=torch.bool)), 2)
        logits = torch.einsum("barhd,bakd->barhk", q * c.head_dim**-0.5, entries)
        logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf)
        sinks = self.p[f"{at}attn_sink"].expand(batch, count, rows, -1).unsqueeze(-1)
        weights = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1]
        out = self._turned(torch.einsum("barhk,bakd->barhd", weights, entries), places, inverse=True)
        return self.of.grouped_output(at, out.reshape(len(x_NC), -1))

    def _entries(self, at: str, x: Tensor, places: Tensor) -> Tensor:
        kv = self.of.norm(self.of.linear(x, f"{at}wkv"), f"{at}kv_norm")
        return self.rounding.window(self._turned(kv.unsqueeze(-2), places).squeeze(-2))

    def _turned(self, x: Tensor, places: Tensor, inverse: bool = False) -> Tensor:
        """Rotated by positions that each row has of its own; x is [..., H, D], places [...]."""
        flat = Rotation(self.rotation.cos[places.flatten()], self.rotation.sin[places.flatten()])
        return flat.apply(x.reshape(1, -1, *x.shape[-2:]), inverse).view(x.shape)


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """`accepted`: share of first to last rows whose likeliest token is the backbone's."""

    total: Tensor
    accepted: tuple[float, ...]


def draft_loss(drafts: Drafts, wanted_BARV: Tensor, balance: Balance) -> DraftLoss:
    """Cross-entropy to the backbone's distribution; the confidence learns whether the likeliest agree.

    `wanted`: the backbone's logits where each row's token is decided.
    """
    expected = torch.log_softmax(drafts.logits, -1)
    nats = -(torch.softmax(wanted_BARV, -1) * expected).sum(-1).mean()
    agrees = (drafts.logits.argmax(-1) == wanted_BARV.argmax(-1)).float()
    sure = F.binary_cross_entropy_with_logits(drafts.confidence, agrees)
    total = nats + sure + 1e-3 * torch.stack(balance.losses).mean()
    return DraftLoss(total, tuple(float(share) for share in agrees.mean((0, 1))))


def spread_anchors(ids_BT: Tensor, count: int, rows: int, noise: torch.Generator) -> tuple[Anchors, Tensor]:
    """Random anchors and, for each row, the position whose logits decide its token: [B, A, R]."""
    length = ids_BT.shape[1]
    positions = torch.randint(1, length - rows, (len(ids_BT), count), generator=noise)
    deciding = positions.unsqueeze(2) + torch.arange(rows)
    taken = ids_BT.gather(1, deciding.flatten(1)).view(deciding.shape)
    return Anchors(positions, ids_BT.gather(1, positions), taken), deciding
