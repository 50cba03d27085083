"""Fields of another type, and texts without UTF-8, are refused by name before anything is queued."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import Make, engines_of, finish, prompt

from engine import Request, SamplingParams
from engine.cache.keys import ImageKey
from engine.errors import InvalidRequest
from engine.field_types import check_fields
from protocol.sampling import Structure

HALF = "v\ud800"
REQUEST = Request("r", prompt(40), SamplingParams(max_tokens=4, ignore_eos=True))
NAMES = {"id": "request_id", "choices": "n"}


@pytest.fixture
def make(tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of("llama", tiny_model) as made:
        yield made


@pytest.mark.parametrize("name", [field.name for field in fields(Request)])
def test_no_field_of_a_request_is_taken_as_something_else(name: str) -> None:
    for wrong in (None, object(), b"x", {}, (None,), True):
        with pytest.raises(InvalidRequest) as refused:
            check_fields(replace(REQUEST, **{name: wrong}))
        assert refused.value.parameter == NAMES.get(name, name)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_nor_is_one_of_how_it_goes_on(name: str) -> None:
    for wrong in (object(), b"x", {}, (None,), ((1,),), 1 + 1j):
        with pytest.raises(InvalidRequest) as refused:
            check_fields(replace(REQUEST, sampling=replace(REQUEST.sampling, **{name: wrong})))
        assert refused.value.parameter == name


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"choices": 2.0}, "n"),
        ({"choices": True}, "n"),
        ({"priority": "1"}, "priority"),
        ({"prompt_ids": (1, 2.0)}, "prompt_ids"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"id": HALF}, "request_id"),
        ({"images": (ImageKey(0, 2, HALF),)}, "digest"),
        ({"images": (ImageKey(0, "2", "d"),)}, "stop"),
        ({"sampling": SamplingParams(stop=("a", HALF))}, "stop"),
        ({"sampling": SamplingParams(max_tokens=2.5)}, "max_tokens"),  # pyright: ignore[reportArgumentType]
        ({"sampling": SamplingParams(structure=Structure("json", ""))}, "kind"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_engine_goes_on_without_them(make: Make, changed: dict[str, Any], parameter: str) -> None:
    engine = make()
    expected = finish(engine, [REQUEST])
    with pytest.raises(InvalidRequest) as refused:
        engine.add(replace(REQUEST, **changed))
    assert refused.value.parameter == parameter
    str(refused.value).encode()
    assert not engine.has_work
    assert finish(engine, [REQUEST]) == expected


def test_lists_and_whole_numbers_of_numpy_serve_as_well() -> None:
    check_fields(replace(REQUEST, prompt_ids=[1, np.int64(2)], slack_ms=1))
    check_fields(SamplingParams(temperature=np.float32(1), logit_bias=((np.int32(1), 2),)))


def test_a_label_without_utf8_leaves_the_weights_as_they_are(make: Make) -> None:
    engine = make()
    expected = finish(engine, [REQUEST])
    engine.add(REQUEST)
    engine.step()
    before = engine.fingerprint
    for model in (None, engine.config.model):
        with pytest.raises(InvalidRequest) as refused:
            engine.update_weights(HALF, model)
        assert refused.value.parameter == "version"
    assert engine.fingerprint == before
    engine.abort("r")
    assert finish(engine, [REQUEST]) == expected
