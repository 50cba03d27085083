"""`Engine.generate` takes what it is given for what was meant, or says what it cannot be."""

from pathlib import Path

import pytest
from engine_runs import finish, small_engine
from tiny_gguf import byte_ids

from engine import Engine, Request, SamplingParams
from engine.errors import EngineClosed, InvalidRequest

FREE = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = tuple(byte_ids(b"hello"))


@pytest.fixture
def engine(tiny_model: Path, cpu_library: Path) -> Engine:
    return small_engine(tiny_model)


def test_a_lone_text_is_one_prompt(engine: Engine) -> None:
    assert engine.generate("hello", FREE) == engine.generate(["hello"], FREE)
    assert len(engine.generate("hello", FREE)) == 1


def test_a_lone_stop_string_is_one(engine: Engine) -> None:
    assert SamplingParams(stop="QZd") == SamplingParams(stop=("QZd",))  # pyright: ignore[reportArgumentType]
    forced = tuple(byte_ids(b"a dQZ bQZd end"))
    for stop in ("QZd", ("QZd",)):
        sampling = SamplingParams(forced_ids=forced, stop=stop)  # pyright: ignore[reportArgumentType]
        assert engine.generate(["hello"], sampling) == ["a dQZ b"]


def test_ids_without_a_list_of_their_own_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="prompts has token ids") as refused:
        engine.generate(PROMPT, FREE)  # pyright: ignore[reportArgumentType]
    assert "[[1, 2, 3]]" in refused.value.hint
    assert not engine.has_work


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_half_an_engine_makes_no_texts(tiny_model: Path, cpu_library: Path, role: str) -> None:
    with pytest.raises(InvalidRequest, match=f"role {role}"):
        small_engine(tiny_model, role=role).generate(["hello"], FREE)


def test_a_closed_engine_does_nothing_more(engine: Engine) -> None:
    engine.add(Request("running", PROMPT, FREE))
    engine.step()
    engine.close()
    engine.close()
    for ask in (
        lambda: engine.generate(["hello"], FREE),
        lambda: engine.add(Request("late", PROMPT, FREE)),
        lambda: engine.fork("running", "fork"),
        lambda: engine.update_weights("2"),
        engine.step,
    ):
        with pytest.raises(EngineClosed, match="has been closed"):
            ask()


def test_generate_beside_other_requests_is_refused_and_leaves_them_whole(
    tiny_model: Path, cpu_library: Path
) -> None:
    other = Request("x", (5, 6, 7), SamplingParams(max_tokens=6, ignore_eos=True))
    expected = finish(small_engine(tiny_model), [other])
    engine = small_engine(tiny_model)
    engine.add(other)
    with pytest.raises(InvalidRequest, match="1 other requests are here") as refused:
        engine.generate(["hello"])
    assert refused.value.parameter == "prompts"
    assert finish(engine) == expected
    assert len(engine.generate(["hello"], SamplingParams(max_tokens=2))) == 1
