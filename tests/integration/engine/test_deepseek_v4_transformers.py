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
from engine_runs import finish
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import Engine, EngineConfig, Request, SamplingParams, load_model
from engine.checkpoint.conversion import convert
from engine.checkpoint.entries import Format
from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.rows import Rows, SequenceRows
from engine.model.deepseek_v4.config import DeepseekV4Config, V4Quantisation
from engine.model.deepseek_v4.model import DeepseekV4Model
from engine.model.deepseek_v4.mtp import DraftBlock
from engine.model.tensor_source import TensorsInMemory, TensorSource
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
YARN = {
    "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 256,
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2,
    "o_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "sliding_window": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "max_position_embeddings": 4096, "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5, "rope_parameters": YARN, "initializer_range": 0.1, "pad_token_id": None,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A model of 3 to 6 layers, with each kind of attention."""
    kinds = draw(
        st.permutations([WINDOW, CSA, HCA, *draw(st.lists(st.sampled_from([CSA, HCA]), max_size=3))])
    )
    rates = {CSA: draw(st.sampled_from([2, 4])), HCA: draw(st.sampled_from([8, 16]))}
    experts = draw(st.sampled_from([4, 8]))
    return FIELDS | {
        "num_hidden_layers": len(kinds), "layer_types": kinds, "compress_rates": rates,
        "hidden_size": draw(st.sampled_from([48, 64])), "head_dim": draw(st.sampled_from([32, 40])),
        "num_attention_heads": draw(st.sampled_from([4, 6])), "o_groups": draw(st.sampled_from([1, 2])),
        "n_routed_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts // 2)),
        "num_hash_layers": draw(st.integers(0, 2)), "sliding_window": draw(st.sampled_from([8, 16])),
        "index_n_heads": draw(st.sampled_from([16, 24])), "index_topk": draw(st.integers(2, 6)),
        "hc_mult": draw(st.sampled_from([2, 4])), "rope_parameters": draw(st.sampled_from([YARN, None])),
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


class LastStreams:
    """An observer that keeps the streams behind a layer."""

    def __init__(self, layer: int, kept: list[Tensor]) -> None:
        self._layer, self._kept = layer, kept

    def left(self, layer: int, stream: Stream, rows: Rows) -> None:
        if layer == self._layer:
            self._kept.append(stream.x)

    def selected(self, layer: int, groups_TK: Tensor, blocks: dict[int, Tensor], rows: Rows) -> None: ...


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


class AsDraft:
    """A source in which the draft block's layer is another name for layer 1, and the rest is random."""

    def __init__(self, tensors: dict[str, Tensor], source: TensorSource) -> None:
        self._tensors, self._source = tensors, source

    def __contains__(self, name: object) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name in self._tensors:
            return self._tensors[name]
        return self._source.take(name.replace("mtp.0.", "layers.1."), shape)

    def check_all_taken(self) -> None: ...


def draft_tensors(channels: int, streams: int) -> dict[str, Tensor]:
    shapes = {
        "e_proj.weight": (channels, channels), "h_proj.weight": (channels, channels),
        "enorm.weight": (channels,), "hnorm.weight": (channels,), "norm.weight": (channels,),
        "hc_head_fn": (streams, streams * channels), "hc_head_base": (streams,), "hc_head_scale": (1,),
    }  # fmt: skip
    return {f"mtp.0.{name}": torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def their_draft(model: Any, ids: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Appendix A.1's formula around transformers' own layer and hyper-head."""

    def normed(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * (mean + model.config.rms_norm_eps).rsqrt() * tensors[f"mtp.0.{name}.weight"]

    streams: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, out: streams.append(out))
    model(ids[None, :-1])
    hook.remove()
    positions = torch.arange(len(ids) - 1)[None]
    of_token = normed(model.model.embed_tokens(ids[1:]), "enorm") @ tensors["mtp.0.e_proj.weight"].T
    x = normed(streams[0], "hnorm") @ tensors["mtp.0.h_proj.weight"].T + of_token[None, :, None]
    distance = positions[0][:, None] - positions[0]
    hidden = (distance < 0) | (distance >= model.config.sliding_window)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    rotary = {"main": model.model.rotary_emb(x, position_ids=positions, layer_type="main")}
    x = model.model.layers[1](
        x, position_embeddings=rotary, position_ids=positions, attention_mask=mask, input_ids=ids[None, 1:]
    )
    head = model.model.hc_head
    for part in ("fn", "base", "scale"):
        getattr(head, f"hc_{part}").copy_(tensors[f"mtp.0.hc_head_{part}"])
    return model.lm_head(normed(head(x), "norm"))[0]


@torch.inference_mode()
def test_the_draft_block_equals_its_formula_around_transformers_layer(
    cpu_library: Path, tmp_path: Path
) -> None:
    """Layer 1 of a model of window layers serves as the draft block's layer, on both sides."""
    fields = FIELDS | {"num_hidden_layers": 2, "layer_types": [WINDOW, WINDOW], "num_hash_layers": 1}
    with torch.inference_mode(False):
        theirs = reference_model(fields, 7)
    theirs.save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    raw = {**saved.folder.config, "num_nextn_predict_layers": 1}
    tensors = draft_tensors(64, 4)
    source = AsDraft(tensors, saved)
    ours = DeepseekV4Model(
        DeepseekV4Config.from_dict(raw, V4Quantisation.off()), source, select_operations(1)
    )
    ids = torch.randint(0, 128, (40,))
    streams: list[Tensor] = []
    cache, rows = ours.new_cache(3, 16, 1), [SequenceRows(0, range(3), 0, 39)]
    ours.forward(ids[:-1], rows, cache, LastStreams(1, streams))
    found, _ = DraftBlock(ours, source).forward(ids[1:], streams[0], rows, cache)
    assert (found - their_draft(theirs, ids, tensors)).abs().max() < TOLERANCE


@pytest.mark.parametrize(("dense", "experts"), [("f32", "f32"), ("fp8", "fp4")])
@torch.inference_mode()
def test_a_folder_of_the_releases_form_gives_the_same_logits(
    cpu_library: Path, tmp_path: Path, dense: Format, experts: Format
) -> None:
    """Converted in float32 to the bit; in the release's formats, those of the weights that they stand for."""
    fields = FIELDS | {"num_hidden_layers": 3, "layer_types": [WINDOW, CSA, HCA], "num_hash_layers": 1}
    fields |= {"compress_rates": {CSA: 4, HCA: 8}}
    with torch.inference_mode(False):
        theirs = reference_model(fields, 11)
    theirs.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "released", dense=dense, experts=experts)
    source = open_checkpoint(tmp_path / "released")
    config = DeepseekV4Config.from_dict(source.folder.config, V4Quantisation.off())
    ours, ids = DeepseekV4Model(config, source, select_operations(1)), torch.randint(0, 128, (50,))
    source.check_all_taken()
    released = "layers.1.attn.wq_b.weight" in source.folder.tensors
    assert released
    if dense == "f32":
        original = ours_of(theirs, tmp_path / "again")
        assert torch.equal(our_logits(ours, ids, 50), our_logits(original, ids, 50))
    else:
        assert source.folder.tensors["layers.1.attn.wq_b.weight"].dtype == "F8_E4M3"
        values = {e.name: source.take(e.name, e.shape) for e in source.family.entries}
        plain = DeepseekV4Model(config, TensorsInMemory(values, "values"), select_operations(1))
        assert torch.equal(our_logits(ours, ids, 50), our_logits(plain, ids, 50))


@torch.inference_mode()
def test_load_model_takes_what_transformers_saves(cpu_library: Path, tmp_path: Path) -> None:
    fields = FIELDS | {"num_hidden_layers": 3, "layer_types": [WINDOW, CSA, HCA], "num_hash_layers": 1}
    fields |= {"compress_rates": {CSA: 4, HCA: 8}, "eos_token_id": 1}
    with torch.inference_mode(False):
        theirs = reference_model(fields, 11)
    theirs.save_pretrained(tmp_path / "saved")
    model, ids = load_model(str(tmp_path / "saved"), threads=1), torch.randint(0, 128, (40,))
    expected = their_logits(theirs, ids, len(ids))
    torch.testing.assert_close(model.logits(ids.tolist()), expected, rtol=0, atol=2e-5)
    fast = load_model(str(tmp_path / "saved"), threads=1, profile="fast").logits(ids.tolist())
    right, found = expected.double().log_softmax(1), fast.double().log_softmax(1)  # else rounding is more
    divergence = (right.exp() * (right - found)).sum(1).mean()
    assert 0 < float(divergence) < 0.01  # weights of float32 are rounded to eight bits
    engine = Engine(EngineConfig(model=str(tmp_path / "saved"), threads=1, kv_cache_bytes=1 << 20))
    request = Request("r", tuple(ids.tolist()), SamplingParams(max_tokens=5, ignore_eos=True))
    assert finish(engine, [request])["r"][0] == int(expected[-1].argmax())


def test_ties_are_few_and_counted(record_property: Any) -> None:
    """Of the examples above, at least five models."""
    if not TALLY.examples:
        pytest.skip("the comparison has not run")
    for name in ("examples", "compared", "tied", "behind", "worst"):
        record_property(name, getattr(TALLY, name))
    print(f"V4 beside transformers: {TALLY}")
    assert TALLY.examples >= 5
    assert TALLY.tied + TALLY.behind <= 0.01 * (TALLY.compared + TALLY.tied + TALLY.behind), TALLY
