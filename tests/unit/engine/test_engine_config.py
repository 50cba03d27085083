"""Sizes that an engine cannot have are refused by their field's name."""

from pathlib import Path

import pytest
from engine_runs import finish, small_engine
from pydantic import ValidationError

from cluster.config import WorkersConfig
from engine import Engine, Request, SamplingParams
from engine.config import MAX_SEQUENCES, EngineConfig
from protocol.errors import ResourceShortage


@pytest.mark.parametrize("config", [EngineConfig, WorkersConfig])
@pytest.mark.parametrize(("field", "value"), [("token_budget", 0), ("max_sequences", MAX_SEQUENCES + 1)])
def test_a_size_that_cannot_serve_is_refused(
    config: type[EngineConfig] | type[WorkersConfig], field: str, value: int
) -> None:
    with pytest.raises(ValidationError, match=field):
        config.model_validate({field: value})


def test_the_least_budget_serves(tiny_model: Path) -> None:
    request = Request("r", tuple(range(10, 40)), SamplingParams(max_tokens=4, ignore_eos=True))
    assert finish(small_engine(tiny_model, token_budget=1), [request]) == finish(
        small_engine(tiny_model), [request]
    )


@pytest.mark.parametrize("kv_cache_bytes", [1 << 60, 1 << 70])
@pytest.mark.parametrize("model", ["tiny", "nano"])
def test_a_cache_too_large_for_memory_is_a_shortage_that_names_the_field(
    tiny_model: Path, model: str, kv_cache_bytes: int
) -> None:
    name = str(tiny_model) if model == "tiny" else model
    with pytest.raises(ResourceShortage, match=f"kv_cache_bytes is {kv_cache_bytes}.*lower kv_cache_bytes"):
        Engine(EngineConfig(model=name, threads=1, kv_cache_bytes=kv_cache_bytes))
