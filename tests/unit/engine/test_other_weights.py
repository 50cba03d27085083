"""A reload that would change what requests in flight go by is refused, and one that fails is none."""

from pathlib import Path
from typing import NoReturn

import pytest
from engine_runs import drain, finish, small_engine
from tiny_gguf import TOKENS, write_tiny_gguf

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidRequest
from engine.model.llama import LlamaModel
from protocol.errors import ResourceShortage

PROMPT = tuple(range(10, 40))
LONG = SamplingParams(max_tokens=8)


@pytest.fixture
def engine(tiny_model: Path, cpu_library: Path) -> Engine:
    return small_engine(tiny_model)


def refuse(engine: Engine, model: Path, match: str) -> None:
    """In the middle of a request, which goes on as if nothing had been asked."""
    expected = finish(engine, [Request("undisturbed", PROMPT, LONG)])["undisturbed"]
    before = engine.fingerprint, engine.model, engine.state
    engine.add(Request("r", PROMPT, LONG))
    first = engine.step().tokens[0].token_ids
    with pytest.raises(InvalidRequest, match=match) as refused:
        engine.update_weights("2", str(model))
    assert refused.value.parameter == "model"
    assert (engine.fingerprint, engine.model, engine.state) == before
    outputs, _ = drain(engine)
    assert (*first, *outputs["r"]) == expected


def test_other_end_tokens_are_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "m.gguf", seed=1, metadata={"tokenizer.ggml.eos_token_id": 65})
    refuse(engine, other, r"ends outputs with the tokens \[65\], the one that runs with \[2\]")


def test_other_tokens_are_refused(engine: Engine, tmp_path: Path) -> None:
    tokens = [*TOKENS[:-1], "xyz"]
    other = write_tiny_gguf(
        tmp_path / "m.gguf", seed=1, metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    )
    refuse(engine, other, "other tokens")


@pytest.mark.parametrize("model", [None, "other.gguf"])
def test_a_version_cannot_look_like_one_with_a_digest(engine: Engine, model: str | None) -> None:
    """`a#DIGEST` names what its owner has told the digest of; other bytes would have the same keys."""
    before = engine.fingerprint
    with pytest.raises(InvalidRequest, match="'#' stands before the digest") as refused:
        engine.update_weights("a#0123456789abcdef", model)
    assert (refused.value.parameter, engine.fingerprint) == ("version", before)


def test_a_reload_without_memory_for_its_caches_leaves_all_as_it_was(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_gguf(tmp_path / "m.gguf", seed=1)
    expected = finish(engine, [Request("r", PROMPT, LONG)])
    before, new_state, closed = engine.model, LlamaModel.new_state, list[object]()

    def no_memory(model: object, *sizes: int) -> NoReturn:
        raise MemoryError("no room for the caches")

    monkeypatch.setattr(LlamaModel, "new_state", no_memory)
    monkeypatch.setattr(LlamaModel, "close", lambda model: closed.append(model))  # noqa: PLW0108 - a function is bound
    with pytest.raises(ResourceShortage, match=r"kv_cache_bytes is .* no room"):
        engine.update_weights("2", str(other))
    assert engine.model is before
    assert len(closed) == 1
    assert closed[0] is not before
    engine.check_integrity()
    assert finish(engine, [Request("r", PROMPT, LONG)]) == expected
    monkeypatch.setattr(LlamaModel, "new_state", new_state)
    engine.update_weights("2", str(other))
    fresh = small_engine(other)
    assert finish(engine, [Request("r", PROMPT, LONG)]) == finish(fresh, [Request("r", PROMPT, LONG)])
