"""What rounded activations cost: `fast` (16 bits) and llama.cpp (8) against `exact`, on the same text.

N positions of the text, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bench.llama_cpp_peer import LlamaCpp
from engine.chat.tokenizer import tokenizer_from_gguf
from engine.gguf_file import open_gguf

_DOCS = Path(__file__).parent.parent / "docs"


class Scoring(Protocol):
    """Of a model, the part that is compared."""

    def logits(self, token_ids: Sequence[int], last_only: bool = False) -> Tensor:
        """[N, V]."""
        ...


@dataclass(frozen=True, slots=True)
class Quality:
    """Top 1: share of positions at which the most likely next token is that of `exact`."""

    positions: int
    top_1_fast: float
    top_1_llama_cpp: float
    perplexity_exact: float
    perplexity_fast: float
    kl_fast: float  # nats a position, of `fast` from `exact`

    @property
    def as_good_as_llama_cpp(self) -> bool:
        return self.top_1_fast >= self.top_1_llama_cpp


def compare(exact: Scoring, fast: Scoring, peer: LlamaCpp, ids: Sequence[int]) -> Quality:
    """Blocks for a decoding step of llama.cpp a position; `ids` fit its context."""
    exact_NV, fast_NV = (model.logits(ids).log_softmax(1) for model in (exact, fast))
    likeliest = torch.tensor([peer.next_token(ids[: end + 1]) for end in range(len(ids))])
    best = exact_NV.argmax(1)
    return Quality(
        positions=len(ids),
        top_1_fast=_share(fast_NV.argmax(1) == best),
        top_1_llama_cpp=_share(likeliest == best),
        perplexity_exact=_perplexity(exact_NV, ids),
        perplexity_fast=_perplexity(fast_NV, ids),
        kl_fast=float((exact_NV.exp() * (exact_NV - fast_NV)).sum(1).mean()),
    )


def text_ids(model: Path, count: int) -> list[int]:
    """The first tokens of this project's documentation."""
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    return tokenizer_from_gguf(open_gguf(model)).encode(text)[:count]


def _share(agreed: Tensor) -> float:
    return float(agreed.float().mean())


def _perplexity(log_probabilities_NV: Tensor, ids: Sequence[int]) -> float:
    following = torch.tensor(ids[1:])[:, None]
    return float((-log_probabilities_NV[:-1].gather(1, following).mean()).exp())
