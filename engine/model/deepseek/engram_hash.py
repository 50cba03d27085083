"""Engram's arithmetic on token ids (sections 7.1 and 7.2): compressed ids, multipliers, primes, table rows.

Shapes: T rows, N ids looked back on (the newest first), V vocabulary.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from engine import numerics
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_fields import refuse

_SEED, _PROTECTED = 10007, "\ue000"
# The tokenizers library's own: it strips all combining marks, and Rust's idea of blanks.
_NORMALISER = normalizers.Sequence([
    normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
    normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), _PROTECTED),
    normalizers.Strip(), normalizers.Replace(_PROTECTED, " "),
])  # fmt: skip
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for every 64-bit number


def compress_ids(tokenizer: Tokenizer) -> Tensor:
    """int64 [V]: each token's compressed id, numbered in order of first appearance (section 7.1)."""
    numbers: dict[str, int] = {}
    ids = [
        numbers.setdefault(_key(tokenizer, token), len(numbers))
        for token in range(tokenizer.get_vocab_size())
    ]
    return torch.tensor(ids)


def _key(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token) or ""
    return normalise(text) or text


def normalise(text: str) -> str:
    """NFKC, NFD, no accents, lower case, runs of blanks to one space, ends stripped; one space stays one."""
    return _NORMALISER.normalize_str(text)


def multiplier_bound(vocabulary: int) -> int:
    """Products of ids and multipliers stay within int64: 46539438283891 for 99,092 compressed ids."""
    return max(1, (2**63 - 1) // vocabulary // 2)


def multipliers(layer: int, ngram: int, vocabulary: int) -> tuple[int, ...]:
    """2a + 1 for `ngram` draws a of the layer's own generator."""
    draws = np.random.default_rng(_SEED * layer).integers(0, multiplier_bound(vocabulary), ngram, np.int64)
    return tuple(2 * int(a) + 1 for a in draws)


def table_primes(config: DeepseekConfig) -> list[list[list[int]]]:
    """By layer, order and head: successive primes from `engram_vocab_size` on that no other head has."""
    used: set[int] = set()
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    return [
        [_next_primes(config.engram_vocab_size, heads, used) for _ in range(orders)]
        for _ in config.engram_layer_ids
    ]


def _next_primes(start: int, number: int, used: set[int]) -> list[int]:
    primes: list[int] = []
    for candidate in count(start):
        if len(primes) == number:
            return primes
        if candidate not in used and is_prime(candidate):
            primes.append(candidate)
            used.add(candidate)
    raise AssertionError


def is_prime(n: int) -> bool:
    """Miller-Rabin with witnesses that leave no 64-bit number undecided."""
    if n < 2 or any(n % p == 0 for p in _WITNESSES):
        return n in _WITNESSES
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, witness, odd, twos) for witness in _WITNESSES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    x = pow(witness, odd, n)
    if x in {1, n - 1}:
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


@dataclass(frozen=True, slots=True)
class EngramHash:
    """One layer's: row = (h mod prime) + offset for each order and head; h rolls over the last ids."""

    multipliers: tuple[int, ...]
    primes: Tensor  # int64 [orders, heads]
    offsets: Tensor

    @classmethod
    def of(cls, config: DeepseekConfig) -> "list[EngramHash]":
        """Of each Engram layer. Raises BrokenModelFile where the tables would have another size."""
        hashes: list[EngramHash] = []
        primes = table_primes(config)
        totals = tuple(sum(map(sum, layer)) for layer in primes)
        if totals != config.engram_num_embeddings:
            expected = f"{list(totals)}, the sums of the primes from engram_vocab_size on"
            raise refuse("text_config.engram_num_embeddings", config.engram_num_embeddings, expected)
        for layer, layer_primes in zip(config.engram_layer_ids, primes, strict=True):
            primes_OH = torch.tensor(layer_primes)
            ends_F = numerics.running_count(primes_OH.flatten(), 0)
            offsets = (ends_F - primes_OH.flatten()).view(primes_OH.shape)
            drawn = multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
            hashes.append(cls(drawn, primes_OH, offsets))
        return hashes

    def rows(self, compressed_TN: Tensor) -> Tensor:
        """int64 [T, orders * heads]: table rows of ids, the newest first."""
        rolling = compressed_TN[:, 0] * self.multipliers[0]
        columns: list[Tensor] = []
        for order in range(len(self.primes)):
            rolling = rolling ^ (compressed_TN[:, order + 1] * self.multipliers[order + 1])
            columns.append(rolling[:, None] % self.primes[order] + self.offsets[order])
        return torch.cat(columns, 1)
