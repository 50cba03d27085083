"""A V4 of the release's own ratios, 4 and 128, as transformers saves it: run and served with defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import Stack, serving
from test_gateway_deepseek_v4 import FIELDS, HELLO, write_saved

from cluster.config import DockyardConfig
from cluster.plan import plan_workers, this_machine
from engine import Engine, EngineConfig, SamplingParams
from engine.errors import InvalidRequest

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
TEXT = "one two three four five " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_saved(tmp_path_factory.mktemp("v4"), {**FIELDS, "compress_rates": RATES})


@pytest.fixture(scope="module", params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    cpu_library: Path,
) -> Iterator[Stack]:
    with serving(folder, tmp_path_factory.mktemp("s"), disaggregated=request.param) as running:
        yield running
        running.wait_until_idle()


def test_chat_and_completions_answer(stack: Stack) -> None:
    with stack.sdk() as sdk:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
        said = sdk.chat.completions.create(**asked, messages=HELLO, reasoning_effort="none")
        assert said.choices[0].message.content
        first, again = (sdk.completions.create(**asked, prompt=TEXT) for _ in range(2))
    assert first.choices[0].text == again.choices[0].text
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached > 0
    assert cached % 128 == 0


def test_an_engine_with_defaults_runs_it(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    assert engine.pool.block_tokens == 128
    assert engine.generate([TEXT], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    engine.close()


def test_a_plan_agrees_and_refuses_other_blocks_before_a_worker_starts(folder: Path) -> None:
    plan = plan_workers(DockyardConfig(model=str(folder)), folder, this_machine())
    assert {worker.engine.block_tokens for worker in plan.workers} == {128}
    other = DockyardConfig.model_validate({"model": str(folder), "workers": {"block_tokens": 16}})
    with pytest.raises(InvalidRequest, match=r"block_tokens is 16, .*\[4, 128\]"):
        plan_workers(other, folder, this_machine())
