"""Threads that grammars need: where none is to be had the request concerned is told, and nobody waits."""

import queue
from collections.abc import Iterator
from typing import NoReturn

import pytest
from thread_shortage import no_thread
from tiny_gguf import EOS

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import Overloaded
from engine.sampling.grammars import Grammars
from engine.sampling.thread_start import start_thread
from engine.sampling.watch import Watch
from protocol.sampling import Structure
from protocol.threads import TimelyThread

AB = Structure("regex", "[ab]+")


@pytest.fixture
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def test_a_thread_that_does_not_come_up_is_waited_for_so_long(shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(Overloaded, match="there is no thread for the request's grammar"):
        start_thread(TimelyThread(int, name="x"))


def test_a_watch_without_a_thread_has_one_later(shortage: pytest.MonkeyPatch) -> None:
    """It took the one that had failed for one that runs."""
    watch = Watch()
    for _ in range(2):
        with pytest.raises(Overloaded):
            watch.run(lambda: True, 1.0)
    shortage.undo()
    assert watch.run(lambda: True, 1.0)[0]
    watch.close()


def test_a_grammar_without_a_thread_is_refused_and_the_next_one_compiled(
    grammars: Grammars, shortage: pytest.MonkeyPatch
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    with pytest.raises(Overloaded):
        grammars.prepare(AB, outcomes.put)
    with pytest.raises(Overloaded):  # for following it there is none either
        grammars.compile(AB)
    shortage.undo()
    assert grammars.known(AB) is None
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is grammars.known(AB) is not None
    assert outcomes.empty()


def test_the_thread_that_follows_is_there_before_a_step_needs_it(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is not None
    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    monkeypatch.setattr("threading._start_new_thread", no_thread)
    assert grammars.matcher(AB).allowed() is not None


def test_what_fails_to_tell_of_a_grammar_keeps_no_other_waiting(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()

    def broken(outcome: object) -> NoReturn:
        raise MemoryError

    grammars.prepare(AB, broken)
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is not None
