"""DeepSeek-V4 beside transformers', an implementation that shares no line with ours, on random tiny weights.

Both run a prompt whole, in chunks and token by token, in float32. Which entries a CSA layer selects turns on
the order of scores: where the k-th and the next differ by at most 1e-6, the two may choose differently, and
rightly so. Such positions are counted, with those behind them, and no more than one in a hundred may be.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation
from engine.model.deepseek_v4.model import DeepseekV4Model
from kernels.operations import select_operations

TOLERANCE, TIE = 2e-5, 1e-6
COUNT, CHUNK = 72, 17
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


@dataclass(slots=True)
class Tally:
    """What the examples compared. `behind`: positions that follow a tie, which may differ as well."""

    examples: int = 0
    compared: int = 0
    tied: int = 0
    behind: int = 0
    worst: float = 0.0


TALLY = Tally()


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A model of 3 to 6 layers, with each kind of attention."""
    kinds = draw(
        st.permutations([WINDOW, CSA, HCA, *draw(st.lists(st.sampled_from([CSA, HCA]), max_size=3))])
    )
    rates = {CSA: draw(st.sampled_from([2, 4])), HCA: draw(st.sampled_from([8, 16]))}
    yarn = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 256}  # fmt: skip
    experts = draw(st.sampled_from([4, 8]))
    return {
        "vocab_size": 128, "hidden_size": draw(st.sampled_from([48, 64])), "moe_intermediate_size": 32,
        "num_hidden_layers": len(kinds), "num_attention_heads": draw(st.sampled_from([4, 6])),
        "num_key_value_heads": 1, "head_dim": draw(st.sampled_from([32, 40])), "qk_rope_head_dim": 8,
        "q_lora_rank": 24, "o_groups": draw(st.sampled_from([1, 2])), "o_lora_rank": 16,
        "n_routed_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts // 2)),
        "n_shared_experts": 1, "sliding_window": draw(st.sampled_from([8, 16])), "layer_types": kinds,
        "compress_rates": rates, "num_hash_layers": draw(st.integers(0, 2)),
        "index_n_heads": draw(st.sampled_from([16, 24])), "index_head_dim": 16,
        "index_topk": draw(st.integers(2, 6)), "hc_mult": draw(st.sampled_from([2, 4])),
        "hc_sinkhorn_iters": 20, "max_position_embeddings": 4096, "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5, "rope_parameters": draw(st.sampled_from([yarn, None])),
        "initializer_range": 0.1, "pad_token_id": None, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def reference_model(fields: dict[str, Any], seed: int) -> Any:
    """Random weights, with nothing left at the zeros and ones that biases, sinks and norms begin with."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config as TheirConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    config = TheirConfig(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("sinks", "position_bias", "base", "e_score_correction_bias")):
                tensor.normal_(0, 0.5)
            elif name.endswith("tid2eid"):
                experts = torch.rand(tensor.shape[0], fields["n_routed_experts"]).argsort(1)
                tensor.copy_(experts[:, : tensor.shape[1]])
            elif "norm" in name or name.endswith("scale"):
                tensor.normal_(1, 0.1)
    return model


def their_logits(model: Any, ids: Tensor, chunk: int) -> Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    return torch.cat([model(part[None], cache=cache).logits[0] for part in ids.split(chunk)])


def our_logits(model: DeepseekV4Model, ids: Tensor, chunk: int) -> Tensor:
    cache, start, parts = model.new_cache(5, 16, 1), 0, []
    for part in ids.split(chunk):
        hidden = model.forward(part, [SequenceRows(0, range(5), start, len(part))], cache)
        parts.append(model.head(hidden))
        start += len(part)
    return torch.cat(parts)


def ties(model: Any, ids: Tensor) -> Tensor:
    """bool [T]: where some layer's k-th and next best visible scores differ by at most TIE."""
    found = torch.zeros(len(ids), dtype=torch.bool)
    rate, k = model.config.compress_rates[CSA], model.config.index_topk

    def look(module: Any, inputs: Any, scores_1TN: Tensor) -> None:
        visible = (torch.arange(len(ids))[:, None] + 1) // rate
        scores = scores_1TN[0].masked_fill(torch.arange(scores_1TN.shape[2]) >= visible, -torch.inf)
        if k < scores.shape[1]:
            best = scores.topk(k + 1).values
            found.logical_or_((visible[:, 0] > k) & (best[:, k - 1] - best[:, k] <= TIE))

    scorers = [m for m in model.modules() if type(m).__name__ == "DeepseekV4IndexerScorer"]
    assert scorers
    hooks = [scorer.register_forward_hook(look) for scorer in scorers]
    their_logits(model, ids, len(ids))
    for hook in hooks:
        hook.remove()
    return found


def ours_of(model: Any, folder: Path) -> DeepseekV4Model:
    """Ours from what transformers saves."""
    model.save_pretrained(folder)
    source = open_checkpoint(folder)
    config = DeepseekV4Config.from_dict(source.folder.config, V4Quantisation.off())
    ours = DeepseekV4Model(config, source, select_operations(1))
    source.check_all_taken()
    return ours


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(fields=configs(), seed=st.integers(0, 2**16))
@settings(max_examples=8, deadline=None, derandomize=True)
@torch.inference_mode()
def test_logits_equal_transformers(cpu_library: Path, fields: dict[str, Any], seed: int) -> None:
    theirs = reference_model(fields, seed)
    with tempfile.TemporaryDirectory() as folder:
        ours = ours_of(theirs, Path(folder))
    ids = torch.randint(0, 128, (COUNT,), generator=torch.Generator().manual_seed(seed))
    tied = ties(theirs, ids)
    clear = int(tied.long().argmax()) if bool(tied.any()) else COUNT
    event(f"{int(tied.sum())} tied positions")
    full = our_logits(ours, ids, COUNT)
    worst = 0.0
    for chunk in (COUNT, CHUNK, 1):
        found = our_logits(ours, ids, chunk)
        assert torch.equal(found, full), f"chunks of {chunk} change bits"
        difference = (found - their_logits(theirs, ids, chunk)).abs().amax(1)[:clear]
        assert bool((difference <= TOLERANCE).all()), (
            f"chunks of {chunk}: {float(difference.max()):.2e} at position {int(difference.argmax())}, "
            f"{int(tied.sum())} tied positions from {clear} on"
        )
        worst = max(worst, float(difference.max()) if clear else 0.0)
    TALLY.examples += 1
    TALLY.compared += clear
    TALLY.tied += int(tied.sum())
    TALLY.behind += COUNT - clear - int(tied.sum())
    TALLY.worst = max(TALLY.worst, worst)


def test_ties_are_few_and_counted(record_property: Any) -> None:
    """Of the examples above, at least five models."""
    if not TALLY.examples:
        pytest.skip("the comparison has not run")
    for name in ("examples", "compared", "tied", "behind", "worst"):
        record_property(name, getattr(TALLY, name))
    print(f"V4 beside transformers: {TALLY}")
    assert TALLY.examples >= 5
    assert TALLY.tied + TALLY.behind <= 0.01 * (TALLY.compared + TALLY.tied + TALLY.behind), TALLY
