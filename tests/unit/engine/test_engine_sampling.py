"""Sampling through the engine: the same tokens alone, in a batch, preempted, and handed over."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_runs import drain, finish, finish_disaggregated, small_engine
from tiny_gguf import EOS, byte_ids

from engine import Engine, Request, SamplingParams
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import CompilingFailed, GrammarStuck, InvalidRequest
from engine.sampling.logprobs import logprobs_of
from engine.sampling.prompt_logprobs import check_prompt_logprobs
from protocol.sampling import Structure
from protocol.sampling_reply import TokenLogprobs

PROMPT = tuple(byte_ids(b"hello world"))
PERSON = Structure(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer", "maximum": 99},
            },
            "required": ["name", "age"],
        }
    ),
)
WARM = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
KINDS = {
    "penalties": replace(
        WARM, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3, ignore_eos=True
    ),
    "bias and min-p": replace(WARM, logit_bias=((30, 4.0), (31, -100.0)), min_p=0.05, min_tokens=30),
    "schema": replace(WARM, structure=PERSON, max_tokens=80),
    "regex after reasoning": replace(
        WARM, structure=Structure("regex", "(ab|cd){5,9}", begins_after=byte_ids(b"#")[0]),
        logit_bias=((byte_ids(b"#")[0], 6.0),),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model: Path, cpu_library: Path) -> Iterator[Engine]:
    made = small_engine(tiny_model)
    yield made
    made.close()


def requests(sampling: SamplingParams) -> list[Request]:
    """Five of different length and seed."""
    return [Request(f"r{n}", PROMPT * (n + 1), replace(sampling, seed=n)) for n in range(5)]


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
def test_tokens_are_the_same_on_every_path(
    engine: Engine, tiny_model: Path, sampling: SamplingParams
) -> None:
    alone: dict[str, Any] = {}
    for request in requests(sampling):
        alone |= finish(engine, [request])
    assert finish(engine, requests(sampling)) == alone
    paths = {
        "preempted": small_engine(tiny_model, kv_cache_bytes=1 << 20, block_tokens=64),
        "prefill": small_engine(tiny_model, role="prefill"),
        "decode": small_engine(tiny_model, role="decode"),
    }
    try:
        assert finish(paths["preempted"], requests(sampling)) == alone
        assert finish_disaggregated(paths["prefill"], paths["decode"], requests(sampling)) == alone
    finally:
        for other in paths.values():
            other.close()


@pytest.mark.parametrize("kind", ["penalties", "schema"])
def test_the_outputs_of_one_request_are_those_of_their_seeds(
    engine: Engine, tiny_model: Path, kind: str
) -> None:
    sampling = KINDS[kind]
    alone = [
        finish(engine, [Request("r", PROMPT, replace(sampling, seed=sampling.seed + n))])["r"]
        for n in range(3)
    ]
    assert several([engine], sampling) == alone
    apart = [small_engine(tiny_model, role=role) for role in ("prefill", "decode")]
    try:
        assert several(apart, sampling) == alone
    finally:
        for other in apart:
            other.close()


def several(engines: list[Engine], sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Tokens of three outputs for one prompt, through engines that hand over to the next."""
    engines[0].add(Request("r", PROMPT, sampling, choices=3))
    outputs: list[tuple[int, ...]] = [(), (), ()]
    while any(engine.has_work for engine in engines):
        for engine, after in zip(engines, [*engines[1:], None], strict=True):
            result = engine.step()
            engine.check_integrity()
            for output in result.tokens:
                assert output.request_id == "r"
                assert output.index == len(outputs[output.choice])
                outputs[output.choice] += output.token_ids
            for handoff in result.handoffs:
                assert after is not None
                after.adopt(handoff)
    return outputs


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
def test_what_the_sampler_has_forgotten_it_makes_again(engine: Engine, sampling: SamplingParams) -> None:
    """As after a preemption whose state is gone, at every token."""
    (kept,) = finish(engine, [Request("r", PROMPT, sampling)]).values()
    engine.add(Request("r", PROMPT, sampling))
    again: list[int] = []
    while engine.has_work:
        again += [token for output in engine.step().tokens for token in output.token_ids]
        engine.sampler.forget("r")
    assert tuple(again) == kept


def test_one_output_ends_alone(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, KINDS["penalties"], choices=3))
    engine.step()
    assert engine.abort("r", 1)
    assert not engine.abort("r", 1)
    left = {(output.request_id, output.choice) for output in engine.step().tokens}
    assert left == {("r", 0), ("r", 2)}
    assert engine.abort("r")
    engine.check_integrity()


def test_preemption_leaves_a_structure_whole(tiny_model: Path, tiny_tokenizer: ChatTokenizer) -> None:
    engine = small_engine(tiny_model, kv_cache_bytes=1 << 20, block_tokens=64)
    try:
        outputs = finish(
            engine, [Request(f"r{n}", PROMPT, replace(KINDS["schema"], seed=n)) for n in range(40)]
        )
        assert engine.statistics().scheduler.preemptions > 0
    finally:
        engine.close()
    for ids in outputs.values():
        if ids[-1] == EOS:
            person = json.loads(tiny_tokenizer.decode(ids))
            assert person.keys() == {"name", "age"}
            assert person["age"] <= 99
    assert any(ids[-1] == EOS for ids in outputs.values())


def test_logprobs_are_told_of_each_token_where_they_are_asked_for(engine: Engine) -> None:
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    plain = finish(engine, [Request("r", PROMPT, greedy)])["r"]
    engine.add(Request("told", PROMPT, replace(greedy, logprobs=3)))
    engine.add(Request("untold", PROMPT, greedy))
    found = []
    while engine.has_work:
        for output in engine.step().tokens:
            assert (output.logprobs is None) == (output.request_id == "untold")
            found += [output.logprobs] if output.logprobs is not None else []
    assert tuple(entry.token_id for entry in found) == plain
    for entry in found:
        assert entry.rank == 1
        assert len(entry.top) == 3
        assert (entry.top[0].token_id, entry.top[0].logprob) == (entry.token_id, entry.logprob)


def test_a_minimum_length_keeps_the_end_away(engine: Engine) -> None:
    towards_the_end = SamplingParams(max_tokens=20, logit_bias=((EOS, 100.0),))
    assert finish(engine, [Request("r", PROMPT, towards_the_end)])["r"] == (EOS,)
    longer = finish(engine, [Request("r", PROMPT, replace(towards_the_end, min_tokens=7))])["r"]
    assert longer[-1] == EOS
    assert longer.index(EOS) == 7


def test_a_structure_that_cannot_be_compiled_is_refused_before_anything_is_queued(engine: Engine) -> None:
    bad = SamplingParams(structure=Structure("regex", "a(b", field="structured_outputs.regex"))
    with pytest.raises(
        InvalidRequest, match=re.escape("structured_outputs.regex: the regex cannot")
    ) as refused:
        engine.add(Request("r", PROMPT, bad))
    assert refused.value.parameter == "structured_outputs.regex"
    assert not engine.has_work
    engine.check_integrity()


def test_an_abort_forgets_what_the_sampler_knows(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, KINDS["schema"]))
    for _ in range(3):
        engine.step()
    engine.abort("r")
    engine.check_integrity()
    outputs, _ = drain(engine)
    assert outputs == {}


def test_logprobs_of_a_prompt_are_those_of_one_whole_pass(engine: Engine, tiny_model: Path) -> None:
    """Whatever the chunks, with neighbours, behind prompts that are cached already, and handed over."""
    prompt = PROMPT * 8
    logits = engine.model.logits(prompt).numpy()
    expected = tuple(logprobs_of(logits[n - 1], prompt[n], 3) for n in range(1, len(prompt)))
    request = Request("r", prompt, SamplingParams(max_tokens=2, prompt_logprobs=3))
    finish(engine, [Request("before", prompt, SamplingParams(max_tokens=2))])
    chunked = small_engine(tiny_model, token_budget=7)
    prefill = small_engine(tiny_model, role="prefill")
    try:
        for other in (engine, chunked, prefill):
            other.add(request)
            other.add(Request("beside", PROMPT, SamplingParams(max_tokens=2)))
            assert told(other) == [("r", 0, expected)]
    finally:
        chunked.close()
        prefill.close()


def told(engine: Engine) -> list[tuple[str, int, tuple[TokenLogprobs, ...]]]:
    """What all steps tell of prompts, with the index of the token that it came with."""
    found: list[tuple[str, int, tuple[TokenLogprobs, ...]]] = []
    while engine.has_work:
        for output in engine.step().tokens:
            if output.prompt_logprobs:
                found.append((output.request_id, output.index, output.prompt_logprobs))
        engine.check_integrity()
    return found


def test_logprobs_of_a_prompt_that_is_too_long_for_them_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="1000000") as refused:
        check_prompt_logprobs(SamplingParams(prompt_logprobs=20), 50_000, skips_rows=False)
    assert refused.value.parameter == "prompt_logprobs"
    with pytest.raises(InvalidRequest, match="replay off"):
        check_prompt_logprobs(SamplingParams(prompt_logprobs=0), 10, skips_rows=True)
    check_prompt_logprobs(SamplingParams(), 10**9, skips_rows=True)


def test_an_output_that_its_grammar_has_held_up_fails_and_the_others_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling.matcher._MOST_S", 0.0)
    engine.add(Request("stuck", PROMPT, KINDS["schema"], choices=2))
    engine.add(Request("free", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)))
    failed: list[tuple[str, str]] = []
    tokens: list[str] = []
    while engine.has_work:
        result = engine.step()
        failed += [(request_id, error.parameter) for request_id, error in result.failed]
        tokens += [output.request_id for output in result.tokens]
        engine.check_integrity()
    assert failed == [("stuck", "response_format")]
    assert tokens == ["free"] * 3
    with pytest.raises(GrammarStuck, match="to follow"):
        engine.generate(["a", "b"], KINDS["schema"])
    assert not engine.has_work


def test_generate_heeds_the_minimum_and_keeps_the_stop_string(engine: Engine) -> None:
    forced = tuple(byte_ids(b"a the b the c"))
    for sampling, text in (
        (SamplingParams(forced_ids=forced, stop=("the",)), "a "),
        (SamplingParams(forced_ids=forced, stop=("the",), include_stop=True), "a the"),
        (SamplingParams(forced_ids=forced, stop=("the",), min_tokens=6), "a the b "),
    ):
        assert engine.generate(["x"], sampling) == [text]


FREE = SamplingParams(max_tokens=6, ignore_eos=True)
AB = Structure("regex", "(ab|cd){5,9}")


@pytest.mark.parametrize(
    ("begun", "told"),
    [
        (b"ax", "does not allow token"),
        (b"abcdx", "number 4"),
        (b"abababababababababa", "number 18"),
    ],
)
def test_a_begun_output_that_its_structure_does_not_allow_is_refused_by_name(
    engine: Engine, begun: bytes, told: str
) -> None:
    request = Request("r", PROMPT, replace(WARM, structure=AB), generated_ids=tuple(byte_ids(begun)))
    with pytest.raises(InvalidRequest, match=told) as refused:
        engine.add(request)
    assert refused.value.parameter == "generated_ids"
    assert not engine.has_work


def test_a_begun_output_goes_on_in_its_structure(engine: Engine, tiny_tokenizer: ChatTokenizer) -> None:
    sampling, begun = replace(WARM, structure=AB), tuple(byte_ids(b"abcda"))
    (rest,) = finish(engine, [Request("r", PROMPT, sampling, generated_ids=begun)]).values()
    assert re.fullmatch("(ab|cd){5,9}", tiny_tokenizer.decode([*begun, *rest[:-1]]))


def test_a_fork_whose_tokens_its_own_structure_does_not_allow_is_refused(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    with pytest.raises(InvalidRequest, match="generated_ids do not fit") as refused:
        engine.fork("r", "other", replace(WARM, structure=AB))
    assert refused.value.parameter == "generated_ids"
    with pytest.raises(InvalidRequest, match="3 tokens of the 2"):
        engine.fork("r", "short", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(drain(engine)[0]["r"]) == 5
    engine.check_integrity()


def test_a_hand_off_whose_token_the_structure_does_not_allow_is_refused(tiny_model: Path) -> None:
    prefill, decode = (small_engine(tiny_model, role=role) for role in ("prefill", "decode"))
    try:
        prefill.add(Request("r", PROMPT, replace(WARM, structure=AB)))
        (handoff,) = prefill.step().handoffs
        bad = replace(handoff, header=msgspec.structs.replace(handoff.header, generated_ids=(1,)))
        with pytest.raises(InvalidRequest, match="do not fit"):
            decode.adopt(bad)
        decode.adopt(handoff)
        drain(decode)
    finally:
        prefill.close()
        decode.close()


def test_a_grammar_is_kept_from_when_its_request_is_queued(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many others are compiled before its first token."""
    monkeypatch.setattr("engine.sampling.grammars._MAX_CACHE_BYTES", 1)
    engine = small_engine(tiny_model)
    try:
        engine.add(Request("r", PROMPT, replace(WARM, structure=AB), choices=2))
        engine.sampler.grammars.compile(Structure("regex", "other"))
        monkeypatch.setattr(engine.sampler.grammars, "_compile", lambda _: pytest.fail("compiled again"))
        assert drain_choices(engine) == {0, 1}
    finally:
        engine.close()


def drain_choices(engine: Engine) -> set[int]:
    """Numbers of the outputs that have ended well."""
    ended: set[int] = set()
    while engine.has_work:
        result = engine.step()
        assert not result.failed
        ended |= {output.choice for output in result.tokens if output.finish_reason is not None}
        engine.check_integrity()
    return ended


def test_a_grammar_that_is_refused_at_a_token_fails_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CompilingFailed("no time", parameter="response_format")

    engine.add(Request("r", PROMPT, replace(WARM, structure=AB)))
    engine.add(Request("free", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True)))
    monkeypatch.setattr(engine.sampler.grammars, "matcher", refuse)
    failed = [name for name, _ in engine.step().failed]
    assert failed == ["r"]
    assert len(drain(engine)[0]["free"]) == 2


def test_an_output_that_fails_ends_another_of_its_request_in_the_middle_of_the_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That other one has rows in the same step, and full blocks among them."""
    engine = small_engine(tiny_model, block_tokens=16)
    engine.add(Request("r", PROMPT * 5, FREE, choices=2))
    engine.add(Request("free", PROMPT, FREE))
    engine.step()
    (other,) = (s for s in engine._scheduler.running if s.choice == 1)
    engine._scheduler._preempt(other)
    engine.pool.forget()  # so that it computes its prompt anew
    choose = engine.sampler.choose

    def stuck(row: Any, name: str, *rest: Any) -> Any:
        if name == "r":
            raise GrammarStuck("held up", parameter="response_format")
        return choose(row, name, *rest)

    monkeypatch.setattr(engine.sampler, "choose", stuck)
    result = engine.step()
    assert [name for name, _ in result.failed] == ["r"]
    assert [output.request_id for output in result.tokens] == ["free"]
    engine.check_integrity()
    drain(engine)
