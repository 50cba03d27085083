"""No memory for what a step's rows lead to ends the request concerned, by a name that blames nobody."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from engine_runs import KINDS, Make, Texts, engines_of, outcomes, prompt
from tiny_gguf import byte_ids

from engine import Engine, Request, SamplingParams
from engine.errors import Overloaded
from engine.sampling.matcher import GrammarMatcher
from protocol.sampling import Structure

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
AB = SamplingParams(max_tokens=6, structure=Structure("regex", "(ab|cd){5,9}"))


@pytest.fixture
def llama(tiny_model: Path, cpu_library: Path) -> Iterator[Make]:
    with engines_of("llama", tiny_model) as made:
        yield made


def python_memory(*arguments: object, **named: object) -> NoReturn:
    raise MemoryError


def torch_memory(*arguments: object, **named: object) -> NoReturn:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def library_memory(*arguments: object, **named: object) -> NoReturn:
    raise RuntimeError("std::bad_alloc")


def run(engine: Engine, *requests: Request) -> tuple[Texts, dict[str, Exception]]:
    for request in requests:
        engine.add(request)
    return outcomes(engine)


PLACES: dict[str, tuple[SamplingParams, str, Callable[..., NoReturn]]] = {
    "prompt logprobs": (
        replace(NEW, prompt_logprobs=2), "engine.sampling.prompt_logprobs.logprobs_of", python_memory
    ),
    "prompt logprobs, torch": (
        replace(NEW, prompt_logprobs=2), "engine.sampling.prompt_logprobs.logprobs_of", torch_memory
    ),
    "logprobs": (replace(NEW, logprobs=2), "engine.sampling.step_sampler.logprobs_of", python_memory),
    "bits of a grammar": (AB, "xgrammar.allocate_token_bitmask", torch_memory),
    "a matcher": (AB, "xgrammar.GrammarMatcher", library_memory),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_it_ends_its_request_alone(llama: Make, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    sampling, name, fault = PLACES[place]
    other = Request("other", prompt(50, 1), NEW)
    expected, _ = run(llama(), other)
    engine = llama()
    monkeypatch.setattr(name, fault)
    texts, failed = run(engine, Request("a", prompt(40), sampling, choices=2), other)
    assert texts == expected
    assert failed.keys() == {"a"}
    assert type(failed["a"]) is Overloaded


@pytest.mark.parametrize("fault", [python_memory, torch_memory])
def test_rows_that_cannot_be_looked_at_end_their_request(
    llama: Make, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., NoReturn]
) -> None:
    engine = llama()
    with monkeypatch.context() as patch:
        patch.setattr("engine.postprocessing.check_logits", fault)
        engine.add(Request("a", prompt(40), NEW))
        assert [(name, type(error)) for name, error in engine.step().failed] == [("a", Overloaded)]
    assert not engine.has_work
    assert run(engine, Request("b", prompt(40), NEW)) == run(llama(), Request("b", prompt(40), NEW))


@pytest.mark.parametrize("method", ["fill_next_token_bitmask", "accept_token"])
def test_a_matcher_without_memory_blames_no_grammar(
    llama: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A client's 400 would say that its grammar cannot be followed."""
    made = GrammarMatcher.__init__

    class Short:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return library_memory if name == method else getattr(self._matcher, name)

    def short(matcher: GrammarMatcher, *arguments: Any, **named: Any) -> None:
        made(matcher, *arguments, **named)
        matcher._matcher = Short(matcher._matcher)

    engine, other = llama(), Request("other", prompt(50, 1), NEW)
    expected, _ = run(llama(), other)
    monkeypatch.setattr(GrammarMatcher, "__init__", short)
    texts, failed = run(engine, Request("a", prompt(40), AB), other)
    assert {key: ids for key, ids in texts.items() if key[0] == "other"} == expected
    assert {name: type(error) for name, error in failed.items()} == {"a": Overloaded}
    if method == "accept_token":  # of an output that goes on, before it is queued
        with pytest.raises(Overloaded, match="no memory for its grammar"):
            engine.add(Request("b", prompt(40), AB, generated_ids=tuple(byte_ids(b"ab"))))
        assert not engine.has_work


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_forks_without_memory_for_a_slot_are_none(
    tiny_model: Path, cpu_library: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Half a slot gave wrong tokens."""
    with engines_of(kind, tiny_model) as make:
        other = Request("other", prompt(50, 1), NEW)
        expected, _ = run(make(), other)
        engine = make()
        monkeypatch.setattr(engine.state, "copy_slot", torch_memory)
        texts, failed = run(engine, Request("a", prompt(40), NEW, choices=3), other)
        assert {key: ids for key, ids in texts.items() if key[0] == "other"} == expected
        assert {name: type(error) for name, error in failed.items()} == {"a": Overloaded}
        engine = make()
        monkeypatch.setattr(engine.state, "copy_slot", torch_memory)
        engine.add(other)
        while not (tokens := engine.step().tokens):
            pass  # its prompt takes several
        with pytest.raises(Overloaded, match="no memory for a fork"):
            engine.fork("other", "fork")
        engine.check_integrity()
        assert engine.requests == {"other"}
        texts, _ = outcomes(engine, begun={"other"})
        assert tokens[0].token_ids + texts["other", 0] == expected["other", 0]
