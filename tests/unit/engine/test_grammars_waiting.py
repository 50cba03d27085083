"""Grammars that wait: for nobody none is compiled, and what they take together is bounded."""

import errno
import queue
from collections.abc import Iterator
from typing import NoReturn

import pytest
from tiny_gguf import EOS

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import GrammarFault, InvalidRequest, Overloaded
from engine.sampling.grammars import Grammars
from protocol.sampling import Structure


@pytest.fixture
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def regex(number: int) -> Structure:
    return Structure("regex", f"[a-c]{{{number}}}")


def test_what_nobody_waits_for_any_more_is_not_compiled(grammars: Grammars) -> None:
    """Twelve clients that had gone held up the thirteenth by all of their grammars' times."""
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    for number in range(1, 13):
        grammars.prepare(regex(number), outcomes.put, lambda: False)
    grammars.prepare(Structure("regex", "[ab]+"), outcomes.put)
    found = [outcomes.get(timeout=60) for _ in range(13)]
    assert found[:12] == [None] * 12
    assert found[12] is not None
    assert not any(grammars.known(regex(number)) for number in range(1, 13))


def test_grammars_that_are_held_are_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request that waits holds its own, beside those that are kept."""
    first = grammars.compile(regex(1))
    monkeypatch.setattr("engine.sampling.grammars._MAX_CACHE_BYTES", 1)
    monkeypatch.setattr("engine.sampling.grammars._MAX_HELD_BYTES", 3 * first.memory_size_bytes)
    held = [first]
    while sum(grammar.memory_size_bytes for grammar in held) < 3 * first.memory_size_bytes:
        held.append(grammars.compile(regex(1 + len(held))))
    with pytest.raises(Overloaded, match="grammars of requests that run or wait take"):
        grammars.compile(regex(28))
    assert grammars.compile(regex(1)) is first  # one that is there costs nothing
    held.clear()
    del first
    assert grammars.compile(regex(28)) is not None


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (Overloaded("too many"), Overloaded),
        (MemoryError(), Overloaded),
        (RuntimeError("std::bad_alloc"), Overloaded),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Overloaded),
        (ZeroDivisionError("a bug"), GrammarFault),
        (InvalidRequest("no grammar", parameter="structure"), InvalidRequest),
    ],
)
def test_whoever_waits_is_told_why_there_is_no_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: type[Exception]
) -> None:
    def fail(structure: Structure) -> NoReturn:
        raise raised

    monkeypatch.setattr(grammars, "_compile", fail)
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    grammars.prepare(regex(1), outcomes.put)
    assert type(outcomes.get(timeout=60)) is told


def test_what_is_held_is_answered_at_once_however_soon_it_is_given_up(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.compile(regex(1))
    with pytest.raises(InvalidRequest):
        grammars.compile(Structure("regex", "a("))
    held = grammars.known(regex(1)), grammars.known(Structure("regex", "a("))
    grammars._compiled.clear()
    grammars._refused.clear()
    monkeypatch.setattr(grammars, "_compile", lambda _: pytest.fail("compiled again"))
    assert held[0] is grammars.compile(regex(1)) is grammar
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        grammars.compile(Structure("regex", "a("))
