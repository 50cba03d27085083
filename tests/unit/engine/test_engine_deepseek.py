"""A DeepSeek-V4.1 model in the engine: the same tokens on every path, with windows, open groups and n-grams.

The models are the golden sets: `a` with quantised caches and Engram, `b` with neither in float32.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_runs import Outputs, drain, finish, finish_disaggregated, small_engine
from safetensors.torch import save_file

from engine import Engine, Request, SamplingParams, load_model
from engine.checkpoint.family import read_family
from engine.errors import BrokenHandoff, InvalidRequest
from engine.model import configs
from engine.model.deepseek.cache import DeepseekCache, SequenceCache
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.serving import DeepseekState
from engine.model.deepseek_v4.cache import DeepseekV4Cache
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model_path import model_path
from kernels.operations import NUMERICS

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"
IDS = {name: json.loads((GOLDEN / name / "ids.json").read_text()) for name in ("a", "b")}
NEW = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(params=["a", "b"])
def golden(request: pytest.FixtureRequest, cpu_library: Path) -> str:
    return request.param


def engine_of(golden: str, **settings: object) -> Engine:
    return small_engine(GOLDEN / golden, **{"kv_cache_bytes": 1 << 20, **settings})


def requests(golden: str) -> list[Request]:
    """Prompts that share their start, of lengths around windows and blocks."""
    ids = IDS[golden]
    lengths = (5, 17, 40, 63, 90)
    return [Request(f"r{n}", (*ids[: length - 3], *ids[-3:]), NEW) for n, length in enumerate(lengths)]


def one_by_one(golden: str, **settings: object) -> Outputs:
    """Each request alone in an engine that has seen nothing."""
    outputs: Outputs = {}
    for request in requests(golden):
        outputs |= finish(engine_of(golden, **settings), [request])
    return outputs


def test_without_replay_tokens_are_those_of_the_whole_pass(golden: str):
    model = load_model(str(GOLDEN / golden), threads=1)
    outputs = one_by_one(golden, replay=False)
    for request in requests(golden):
        ids = list(request.prompt_ids)
        for token in outputs[request.id]:
            assert int(model.logits(ids, last_only=True).argmax()) == token
            ids.append(token)
    model.close()


@pytest.mark.parametrize(("replay", "profile"), [(True, "exact"), (False, "exact"), (True, "fast")])
def test_every_path_gives_the_same_tokens(golden: str, replay: bool, profile: str):
    kind = {"replay": replay, "profile": profile}
    expected = one_by_one(golden, **kind)
    for budget, some in ((2, slice(0, 3)), (7, slice(2, 4)), (64, slice(4, 5))):
        for request in requests(golden)[some]:
            engine = engine_of(golden, **kind, token_budget=budget)
            assert finish(engine, [request])[request.id] == expected[request.id], f"chunks of {budget}"
    for request in requests(golden)[1::2]:
        together = engine_of(golden, **kind, token_budget=512)
        outputs = finish(together, [request, Request("n", tuple(IDS[golden][20:50]), NEW)])
        assert outputs[request.id] == expected[request.id]
        pair = (engine_of(golden, **kind, role=role) for role in ("prefill", "decode"))
        # The prefill engine gives the first token, the decode engine the others.
        assert finish_disaggregated(*pair, [request])[request.id] == expected[request.id]


def test_preempted_requests_come_to_the_same_tokens(golden: str):
    expected = one_by_one(golden)
    engine = engine_of(golden, token_budget=32)
    held = requests(golden)[3]
    engine.add(held)
    results = engine.step().tokens
    while not results:
        results = engine.step().tokens
    tokens = results[0].token_ids
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence)
    engine.check_integrity()
    rest, _ = drain(engine)
    assert tokens + rest[held.id] == expected[held.id]
    assert engine.statistics().scheduler.preemptions == 1


def test_a_prefix_hit_is_resumed_in_its_window_and_stays_so_when_preempted(golden: str):
    ids = IDS[golden]
    first, second = Request("one", tuple(ids[:64]), NEW), Request("two", tuple(ids[:80]), NEW)

    def behind_the_first(**settings: object) -> tuple[Engine, int]:
        engine = engine_of(golden, **settings)
        finish(engine, [first])
        engine.add(second)
        result = engine.step()
        return engine, result.tokens[0].num_cached if result.tokens else -1

    engine, cached = behind_the_first(token_budget=512)
    expected, _ = drain(engine)
    assert cached == 64
    for budget in (9, 40):
        engine, _ = behind_the_first(token_budget=budget)
        outputs, _ = drain(engine)
        assert outputs["two"][-len(expected["two"]) :] == expected["two"]
    engine, _ = behind_the_first(token_budget=512)
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence)
    outputs, _ = drain(engine)
    assert outputs == expected


def test_a_fingerprint_tells_weights_and_replay_apart(golden: str):
    one, same = engine_of(golden), engine_of(golden)
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != engine_of(golden, replay=False).fingerprint
    assert one.fingerprint != engine_of("b" if golden == "a" else "a").fingerprint


def test_a_fingerprint_tells_what_computes_apart(golden: str, monkeypatch: pytest.MonkeyPatch):
    """Profiles, kinds of kernels, and versions of a profile: their entries differ in bits."""
    one, fast = engine_of(golden), engine_of(golden, profile="fast")
    assert len({e.fingerprint for e in (one, fast, engine_of(golden, operations="torch"))}) == 3
    monkeypatch.setitem(NUMERICS, "fast", NUMERICS["fast"] + 1)
    assert engine_of(golden).fingerprint == one.fingerprint
    assert engine_of(golden, profile="fast").fingerprint != fast.fingerprint


def test_an_engine_of_another_numerics_version_takes_no_hand_off(
    golden: str, monkeypatch: pytest.MonkeyPatch
):
    prefill = engine_of(golden, profile="fast", role="prefill")
    monkeypatch.setitem(NUMERICS, "fast", NUMERICS["fast"] + 1)
    newer = engine_of(golden, profile="fast", role="decode")
    with pytest.raises(BrokenHandoff, match="model"):
        finish_disaggregated(prefill, newer, requests(golden)[:1])


def test_caches_are_what_was_asked_for(golden: str):
    ids = IDS[golden][:40]
    auto, released, plain = (
        load_model(str(GOLDEN / golden), threads=1, caches=caches).logits(ids)
        for caches in ("auto", "released", "float32")
    )
    assert torch.equal(auto, released)
    assert not torch.equal(auto, plain)


def test_positions_past_the_last_are_refused(golden: str):
    engine = engine_of(golden)
    long = Request("long", tuple(IDS[golden][:1]) * engine.max_positions, NEW)
    with pytest.raises(InvalidRequest, match="positions"):
        engine.add(long)


LONG = 10_000  # tokens of one request
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "eos_token_id": 1,
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 1, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 32, "o_groups": 1,
    "o_lora_rank": 32, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
    "sliding_window": 16, "compress_ratios": [0, 4, 16, 4], "num_hash_layers": 1, "index_n_heads": 1,
    "index_head_dim": 64, "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 16_384, "rope_theta": 10_000,
    "compress_rope_theta": 160_000, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


def long_v41(folder: Path) -> Path:
    """Golden set b for more positions."""
    shutil.copytree(GOLDEN / "b", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16_384
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_v4(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(V4))
    entries = read_family(V4).entries
    tensors = {
        e.name: torch.zeros(e.shape, dtype=torch.int64) if e.kind == "ids" else torch.randn(e.shape) * 0.1
        for e in entries
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


BYTES = {  # a token: (main + index) / ratio of each kv source, by section 3
    "v41": (long_v41, 2 * (18 + 17) / 2 + (18 + 17)),
    "v4": (random_v4, 2 * (200 + 34) / 4 + 200 / 16),
    "nano": (lambda _: model_path("nano"), 106.0),
}


def global_bytes(cache: SequenceCache) -> int:
    """Of main entries and index keys of all blocks, as the tensors themselves are."""
    return sum(source.main.nbytes + source.index.nbytes for source in cache.sources.values())


@pytest.mark.parametrize("name", BYTES)
def test_10000_tokens_take_the_blocks_that_they_should(name: str, tmp_path: Path, cpu_library: Path):
    """In an engine that runs them: what their blocks take is bytes a token times tokens, up to one block."""
    make, bytes_per_token = BYTES[name]
    settings = {"kv_cache_bytes": 2 << 20, "caches": "released", "token_budget": 512, "max_sequences": 1}
    engine, most = small_engine(make(tmp_path / name), **settings), 0
    assert engine.model.cache_bytes_per_token() == bytes_per_token
    assert isinstance(engine.state, DeepseekState)
    block_bytes = global_bytes(engine.state.cache) / engine.statistics().pool.total
    assert block_bytes == bytes_per_token * engine.pool.block_tokens
    ids = tuple(i * 7 % 60 + 3 for i in range(LONG))
    engine.add(Request("long", ids, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        most = max(most, engine.statistics().pool.held)
    assert 0 <= most * block_bytes - bytes_per_token * LONG < block_bytes


@pytest.mark.parametrize(("name", "bytes_per_token"), [
    ("deepseek-v4.1-flash", 890.0), ("deepseek-v4-flash", 3514.25),
])  # fmt: skip
def test_caches_of_the_released_shapes_take_their_bytes(name: str, bytes_per_token: float):
    """The state that an engine allocates, of the blocks that 10,000 tokens need; without any weights."""
    raw = json.loads((Path(configs.__file__).parent / f"{name}.json").read_text())
    block, num_blocks = 128, -(-LONG // 128)
    if name == "deepseek-v4.1-flash":
        cache: SequenceCache = DeepseekCache(DeepseekConfig.from_dict(raw), num_blocks, block, 1)
    else:
        cache = DeepseekV4Cache(DeepseekV4Config.from_dict(raw), num_blocks, block, 1)
    assert global_bytes(cache) == bytes_per_token * num_blocks * block
    assert 0 <= global_bytes(cache) - bytes_per_token * LONG < bytes_per_token * block
