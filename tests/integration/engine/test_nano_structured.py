"""Structured output on nano, whose tokenizer has the control tokens: first reasoning, then DSML calls."""

import json
from collections.abc import Iterator

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.chat.deepseek import load_format
from engine.chat.deepseek_prompt import THOUGHT
from engine.chat.dsml import V41, ToolCall
from engine.chat.dsml_parser import Event, Reasoning, ReplyParser
from engine.chat.tokenizer import ChatTokenizer
from engine.chat.tool_grammar import Signature, tool_grammar
from protocol.sampling import Structure

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"enum": ["/tmp/a b", "/etc"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 3},
    },
    "required": ["path", "depth"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(cpu_library: object) -> Iterator[Engine]:
    made = Engine(EngineConfig(model="nano", threads=1, kv_cache_bytes=8 << 20))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> ChatTokenizer:
    return engine.model.tokenizer()


def replies(engine: Engine, tokenizer: ChatTokenizer, structure: Structure, count: int) -> list[str]:
    """Of as many seeds; each has room to end."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
    prompt = load_format("v41").render([{"role": "user", "content": "Where is it?"}], tools=tools)
    assert prompt.thinking
    ids = tuple(prompt.ids(tokenizer))
    (end,) = tokenizer.encode(THOUGHT)
    for seed in range(count):
        # Untrained for reasoning, it is led to the end of it after a while.
        sampling = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=300, structure=structure, logit_bias=((end, 14.0),)
        )
        engine.add(Request(f"r{seed}", ids, sampling))
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        result = engine.step()
        assert not result.failed
        for output in result.tokens:
            texts.setdefault(output.request_id, []).extend(output.token_ids)
    engine.check_integrity()
    return [tokenizer.decode(ids) for ids in texts.values()]


def test_after_the_reasoning_comes_a_call_and_nothing_else(engine: Engine, tokenizer: ChatTokenizer) -> None:
    (end,) = tokenizer.encode(THOUGHT)
    source = tool_grammar([Signature("find", SCHEMA)], V41, several=False)
    structure = Structure("structural_tag", source, "tools", begins_after=end)
    ended = 0
    for text in replies(engine, tokenizer, structure, 4):
        if THOUGHT not in text or not text.endswith("calls>"):
            continue
        parser = ReplyParser(V41, thinking=True)
        events: list[Event] = [*parser.push(text), *parser.finish()]
        (call,) = [event for event in events if isinstance(event, ToolCall)]
        assert call.name == "find"
        assert call.arguments["path"] in ("/tmp/a b", "/etc")
        assert 0 <= call.arguments["depth"] <= 3
        assert "".join(e.text for e in events if isinstance(e, Reasoning)) == text.split(THOUGHT)[0]
        ended += 1
    assert ended > 0


def test_a_schema_holds_behind_the_reasoning(engine: Engine, tokenizer: ChatTokenizer) -> None:
    (end,) = tokenizer.encode(THOUGHT)
    structure = Structure("json_schema", json.dumps(SCHEMA), begins_after=end)
    texts = [
        text.split(THOUGHT, 1)[1] for text in replies(engine, tokenizer, structure, 3) if THOUGHT in text
    ]
    whole = [json.loads(text) for text in texts if text.endswith("}")]
    assert whole
    assert all(value.keys() == {"path", "depth"} for value in whole)
