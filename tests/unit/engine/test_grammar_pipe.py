"""An error while the compiling process is asked leaves nothing of its answer to whoever asks next."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from tiny_gguf import EOS, byte_ids

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import GrammarFault, Overloaded
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.grammars import Grammars
from engine.sampling.watch import Watch
from protocol.sampling import Structure

ASKED, NEXT = Structure("regex", "[ab]+"), Structure("regex", "[xy]+")
Call = Callable[..., Any]


@pytest.fixture
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def before(call: Call, error: BaseException) -> Call:
    def called(*arguments: Any) -> NoReturn:
        raise error

    return called


def behind_a_part(call: Call, error: BaseException) -> Call:
    """Some bytes of what it reads are taken and lost; of what it writes all are there."""

    def called(compiler: GrammarCompiler, first: Any, *rest: Any) -> NoReturn:
        call(compiler, 3 if isinstance(first, int) else first, *rest)
        raise error

    return called


def nth(number: int, change: Callable[[Call, BaseException], Call], error: BaseException, call: Call) -> Call:
    calls = 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return (change(call, error) if calls == number else call)(*arguments)

    return called


def first_allowed(grammars: Grammars, structure: Structure) -> set[str]:
    allowed = grammars.matcher(structure).allowed()
    assert allowed is not None
    return {letter for letter in "abxy" if allowed[byte_ids(letter.encode())[0]]}


def outcome(grammars: Grammars, structure: Structure) -> object:
    found: list[object] = []
    grammars._prepare(structure, found.append, lambda: True)
    return found[0]


@pytest.mark.parametrize(
    ("place", "change", "error", "told"),
    [
        (("_send", 1), before, MemoryError(), Overloaded),
        (("_read", 1), before, MemoryError(), Overloaded),
        (("_send", 2), behind_a_part, MemoryError(), Overloaded),
        (("_read", 3), before, ZeroDivisionError("a bug"), GrammarFault),
        (("_read", 4), behind_a_part, MemoryError(), Overloaded),
    ],
)
def test_the_next_one_gets_its_own_grammar(
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    *,
    place: tuple[str, int],
    change: Callable[[Call, BaseException], Call],
    error: Exception,
    told: type[Exception],
) -> None:
    """While the process is told of its vocabulary, and says that it is up; at a grammar and its answer."""
    method, number = place
    call = getattr(GrammarCompiler, method)
    monkeypatch.setattr(GrammarCompiler, method, nth(number, change, error, call))
    assert type(outcome(grammars, ASKED)) is told
    assert first_allowed(grammars, NEXT) == {"x", "y"}
    assert first_allowed(grammars, ASKED) == {"a", "b"}


def test_an_interrupted_question_ends_the_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.compile(Structure("regex", "c"))
    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "_read", before(GrammarCompiler._read, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            grammars.compile(ASKED)
    assert first_allowed(grammars, NEXT) == {"x", "y"}


def test_a_watched_call_whose_answer_was_not_taken_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same between the engine's thread and the one that follows grammars."""
    watch = Watch()
    assert watch.run(lambda: True, 1.0)[0]
    thread: Any = watch._thread
    answers = thread._answers

    class Short:
        put = answers.put

        def get(self, timeout: float) -> NoReturn:
            raise MemoryError

    monkeypatch.setattr(thread, "_answers", Short())
    with pytest.raises(MemoryError):
        watch.run(lambda: True, 1.0)
    monkeypatch.setattr(thread, "_answers", answers)
    assert watch.run(lambda: False, 1.0)[0] is False
    watch.close()
