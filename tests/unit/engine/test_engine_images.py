"""Images among a prompt's tokens are part of what is cached: their ids are alike, what they show is not."""

import random
from pathlib import Path

import pytest
from engine_runs import drain, small_engine
from tiny_gguf import TOKENS

from engine import Engine, Request, SamplingParams
from engine.cache.keys import ImageKey
from engine.errors import InvalidRequest

NEW = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPT = tuple(random.Random(9).choices(range(3, len(TOKENS)), k=70))
HOST = {"host_bytes": 8 << 20}


@pytest.fixture(autouse=True)
def library(cpu_library: Path) -> None:
    """Engines here run the C operations."""


def cached(engine: Engine, *images: ImageKey, prompt: tuple[int, ...] = PROMPT) -> int:
    """Of a request's prompt, the positions that were known."""
    engine.add(Request("r", prompt, NEW, images=images))
    found = {output.num_cached for output in engine.step().tokens}
    drain(engine)
    (count,) = found
    return count


def test_a_prefix_is_shared_up_to_the_first_image_that_differs(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    one, other = ImageKey(20, 40, "a" * 32), ImageKey(20, 40, "b" * 32)
    assert cached(engine, one) == 0
    assert cached(engine, one) == 64
    assert cached(engine, other) == 16
    assert cached(engine) == 16
    assert cached(engine, ImageKey(21, 40, "a" * 32)) == 16
    assert cached(engine, one, ImageKey(66, 70, "c" * 32)) == 64


def test_the_same_image_elsewhere_in_its_block_is_another_block(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    same = (5,) * 70
    assert cached(engine, ImageKey(2, 6, "a" * 32), prompt=same) == 0
    assert cached(engine, ImageKey(3, 7, "a" * 32), prompt=same) == 0


def test_images_go_along_with_a_hand_off_a_fork_and_a_tier(tiny_model: Path) -> None:
    one, other = ImageKey(20, 40, "a" * 32), ImageKey(20, 40, "b" * 32)
    prefill, decode = small_engine(tiny_model, role="prefill"), small_engine(tiny_model, role="decode")
    prefill.add(Request("r", PROMPT, NEW, images=(one,)))
    (handoff,) = prefill.step().handoffs
    decode.adopt(handoff)
    drain(decode)
    both = small_engine(tiny_model, tiers=HOST)
    both.add(Request("r", PROMPT, NEW, images=(one,)))
    both.step()
    both.fork("r", "fork")
    drain(both)
    both.pool.release(both.pool.allocate(both.pool.num_available))
    assert cached(both, other) == 16
    assert cached(both, one) == 64
    assert both.statistics().scheduler.loaded_blocks >= 4


@pytest.mark.parametrize("image", [(-1, 4), (4, 4), (60, 71), (70, 80)])
def test_an_image_that_lies_beside_the_prompt_is_refused(tiny_model: Path, image: tuple[int, int]) -> None:
    engine = small_engine(tiny_model)
    with pytest.raises(InvalidRequest, match="not within the prompt's 70 ids") as refused:
        engine.add(Request("r", PROMPT, NEW, images=(ImageKey(*image, "a" * 32),)))
    assert refused.value.parameter == "images"
