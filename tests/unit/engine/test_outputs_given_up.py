"""Each of several outputs is given up alone, whenever: before the prompt is computed as behind it."""

from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest
from engine_runs import Make, engines_of, prompt

from engine import Engine, Request, SamplingParams
from engine.errors import InvalidRequest

NEW = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0)
REQUEST = Request("r", prompt(90), NEW, choices=3)
Texts = dict[int, tuple[int, ...]]


@pytest.fixture
def make(tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of("llama", tiny_model) as made:
        yield made


def rest(engine: Engine) -> Texts:
    texts: Texts = {}
    while engine.has_work:
        for output in engine.step().tokens:
            texts[output.choice] = texts.get(output.choice, ()) + output.token_ids
        engine.check_integrity()
    assert engine.statistics().pool.held == 0
    return texts


def begun(make: Make, steps: int, **settings: object) -> Engine:
    engine = make(token_budget=32, **settings)
    engine.add(REQUEST)
    for _ in range(steps):
        assert not engine.step().tokens
    return engine


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_others_come_as_if_nothing_had_been(make: Make, steps: int) -> None:
    expected = rest(begun(make, 0))
    assert expected.keys() == {0, 1, 2}
    for gone in chain.from_iterable(combinations(range(3), count) for count in range(1, 4)):
        engine = begun(make, steps)
        for number, choice in enumerate(gone, 1):
            assert engine.abort("r", choice)
            engine.check_integrity()
            assert engine.outputs.get("r", 0) == 3 - number
        assert not engine.abort("r", gone[0])
        assert not engine.abort("r", 3)
        assert engine.has_work == (len(gone) < 3)
        assert rest(engine) == {choice: ids for choice, ids in expected.items() if choice not in gone}


def test_a_place_of_the_queue_is_free_again(make: Make) -> None:
    engine = begun(make, 1, max_waiting=3)
    engine.add(Request("a", prompt(20), NEW))
    with pytest.raises(Exception, match="requests are waiting"):
        engine.add(Request("b", prompt(20), NEW))
    assert engine.abort("r", 2)
    engine.add(Request("b", prompt(20), NEW))
    engine.abort("a")
    engine.abort("b")
    assert rest(engine).keys() == {0, 1}


def test_no_hand_off_is_made_of_one_that_was_given_up(make: Make) -> None:
    for gone in range(3):
        engine = begun(make, 1, role="prefill")
        assert engine.abort("r", gone)
        handoffs = [given.header.choice for _ in range(4) for given in engine.step().handoffs]
        assert sorted(handoffs) == [choice for choice in range(3) if choice != gone]
        assert not engine.has_work
        engine.check_integrity()


def test_of_a_first_output_that_was_given_up_there_is_no_fork(make: Make) -> None:
    engine = begun(make, 1)
    assert engine.abort("r", 0)
    with pytest.raises(InvalidRequest, match="has not begun to run here"):
        engine.fork("r", "kid")
    assert rest(engine).keys() == {1, 2}
