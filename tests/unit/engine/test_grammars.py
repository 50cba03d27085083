"""Grammars: what they allow, how they are refused, and that nothing a client sends holds up an engine."""

import json
import queue
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hand_clock import HandClock
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import EOS, TOKENS, byte_ids

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import CompilingFailed, GrammarStuck, InvalidRequest
from engine.sampling.grammar_compiler import CompileLimits
from engine.sampling.grammars import Grammars
from engine.sampling.matcher import GrammarMatcher
from protocol.sampling import Structure, StructureKind

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def accepts(grammars: Grammars, structure: Structure, text: str) -> bool:
    """Whether the text, byte by byte, is one that may end."""
    matcher = grammars.matcher(structure)
    for token in byte_ids(text.encode()):
        allowed = matcher.allowed()
        if allowed is not None and not allowed[token]:
            return False
        matcher.follow([token])
    allowed = matcher.allowed()
    return allowed is None or bool(allowed[EOS])


def schema(value: Any) -> Structure:
    return Structure("json_schema", json.dumps(value))


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (schema(PERSON), '{"name": "x", "age": 3}', '{"name": "x"}'),
        (schema(PERSON), '{\n  "name": "x",\n  "age": 3\n}', '{"age": "3"}'),
        (schema({"enum": ["a", "é漢"]}), '"é漢"', '"b"'),
        (Structure("json_object"), '{"any": [1, {"x": null}]}', "[1]"),
        (Structure("regex", r"[a-c]{2}(x|y)"), "abx", "ab"),
        (Structure("grammar", 'root ::= "yes" | "no" rest\nrest ::= [a-z]+'), "nox", "no"),
    ],
)
def test_what_is_of_the_structure_may_be_written_and_nothing_else(
    grammars: Grammars, structure: Structure, good: str, bad: str
) -> None:
    assert accepts(grammars, structure, good)
    assert not accepts(grammars, structure, bad)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_whatever_allowed_tokens_are_taken_the_text_is_of_the_structure(
    grammars: Grammars, tiny_tokenizer: ChatTokenizer, seed: int
) -> None:
    pattern = r"(ab|[0-9]{1,3}){1,4}the"
    matcher = grammars.matcher(Structure("regex", pattern))
    random = np.random.default_rng(seed)
    ids: list[int] = []
    while True:
        allowed = matcher.allowed()
        assert allowed is not None
        token = int(random.choice(np.flatnonzero(allowed)))
        if token == EOS:
            break
        ids.append(token)
        matcher.follow([token])
    assert re.fullmatch(pattern, tiny_tokenizer.decode(ids))


@settings(deadline=None)
@given(cut=st.integers(0, 40))
def test_a_matcher_made_again_allows_the_same(grammars: Grammars, cut: int) -> None:
    ids = byte_ids(b'{"name": "the hello", "age": 12, "tags": []}')
    first, again = grammars.matcher(schema(PERSON)), grammars.matcher(schema(PERSON))
    for token in ids[:cut]:
        first.follow([token])
    again.follow(ids[:cut])
    np.testing.assert_array_equal(mask(first), mask(again))


def mask(matcher: GrammarMatcher) -> np.ndarray:
    allowed = matcher.allowed()
    return np.ones(len(TOKENS), np.bool_) if allowed is None else allowed.copy()


def test_control_tokens_are_never_of_a_structure(grammars: Grammars) -> None:
    allowed = mask(grammars.matcher(Structure("regex", r"[\s\S]*")))
    assert allowed[:3].tolist() == [False, False, True]  # only the end of the text


def test_before_the_end_of_the_reasoning_everything_goes_but_the_end(grammars: Grammars) -> None:
    (end,) = byte_ids(b"#")
    matcher = grammars.matcher(Structure("regex", "ab", begins_after=end))
    free = np.flatnonzero(~mask(matcher)).tolist()
    matcher.follow(byte_ids(b"xyz"))
    assert free == np.flatnonzero(~mask(matcher)).tolist() == [EOS]
    matcher.follow([end])
    assert np.flatnonzero(mask(matcher)).tolist() == byte_ids(b"a")
    matcher.follow(byte_ids(b"ab"))
    assert np.flatnonzero(mask(matcher)).tolist() == [EOS]


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("regex", "a(b", "The parenthesis is not closed"),
        ("regex", "(?<=a)b", "Lookbehind is not supported"),
        ("grammar", "root ::= foo", 'Rule "foo" is not defined'),
        ("grammar", "no grammar", "cannot be compiled"),
        ("json_schema", '{"type": "foo"}', 'Unsupported type "foo"'),
        ("json_schema", '{"type": "object",', "it is not JSON"),
        ("json_schema", "5", "schema is 5, expected an object"),
        ("json_schema", '{"$ref": "#/nope"}', "nope"),
        ("json_schema", '{"$ref": "#"}', "Circular"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("structural_tag", "{}", "cannot be compiled"),
        ("json_schema", r'{"properties": {"\ud800": {"not": {}}}}', r"half a surrogate pair, '\ud800'"),
        ("json_schema", r'{"enum": ["\udc00"]}', "half a surrogate pair"),
        (
            "structural_tag",
            r'{"format": {"type": "json_schema", "json_schema": {"x\ud800": 1}}}',
            "half a surr",
        ),
        ("regex", "a\ud800", "half a surrogate pair"),
        ("grammar", 'root ::= "\ud800"', "half a surrogate pair"),
        ("regex", "a" * (200 << 10), "204800 bytes, more than 131072"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_field_and_cause(
    grammars: Grammars, kind: StructureKind, source: str, told: str
) -> None:
    structure = Structure(kind, source, field="response_format.json_schema")
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest, match=re.escape(told)) as refused:
            grammars.compile(structure)
        assert refused.value.parameter == "response_format.json_schema"
        assert str(refused.value).startswith(f"response_format.json_schema: the {kind} cannot be compiled: ")
        assert "/project/" not in str(refused.value)
        assert len(str(refused.value).encode()) < 600


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"not": {"type": "string"}}, "schema has 'not'"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "schema.properties.a has 'if'"),
        (
            {"type": "array", "items": {"type": "array", "uniqueItems": True}},
            "schema.items has 'uniqueItems'",
        ),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "'allOf' of 2 schemas"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "only one is supported"),
        ({"minimum": 5}, "'minimum' without 'type'"),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, "'minimum' beside '$ref'"),
        ({"anyOf": [{"type": "integer"}, {"not": {}}]}, "schema.anyOf[1] has 'not'"),
    ],
)
def test_what_a_grammar_would_leave_out_is_refused_by_name(grammars: Grammars, value: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        grammars.compile(schema(value))


def test_names_of_properties_are_no_keywords(grammars: Grammars) -> None:
    value = {"type": "object", "properties": {"not": {"const": {"if": 1}}}, "required": ["not"]}
    assert accepts(grammars, schema(value), '{"not": {"if":1}}')


def test_a_grammar_that_takes_too_long_is_given_up_and_the_next_one_is_compiled(
    tiny_tokenizer: ChatTokenizer,
) -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(seconds=0.5))
    try:
        with pytest.raises(InvalidRequest, match=r"more than 0\.5 s"):
            grammars.compile(schema(wide))
        assert accepts(grammars, Structure("regex", "ab"), "ab")
    finally:
        grammars.close()


def test_a_refusal_for_want_of_time_passes(
    tiny_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Structure("regex", "(ab)+")
    clock = HandClock()
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(seconds=-1), clock)
    try:
        with pytest.raises(CompilingFailed, match="more than -1 s"):
            grammars.compile(one)
        assert grammars.known(one) is not None  # for now: nobody has the engine wait for it once more
        monkeypatch.setattr(grammars, "_limits", CompileLimits(seconds=20))
        monkeypatch.setattr(grammars._compiler, "_limits", CompileLimits(seconds=20))
        with pytest.raises(InvalidRequest, match="more than -1 s"):
            grammars.compile(one)
        clock.now += 30 * 10**9 - 1
        assert grammars.known(one) is not None
        clock.now += 1
        assert grammars.known(one) is None
        assert grammars.compile(one) is not None
    finally:
        grammars.close()


def test_a_grammar_that_somebody_holds_is_not_compiled_again(
    tiny_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling.grammars._MAX_CACHE_BYTES", 1)
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS})
    try:
        one = Structure("regex", "held")
        held = grammars.compile(one)
        grammars.compile(Structure("regex", "other"))
        assert grammars.compile(one) is held
        del held
        grammars.compile(Structure("regex", "third"))
        assert grammars.known(one) is None
    finally:
        grammars.close()


def test_what_the_library_only_warns_of_is_refused(grammars: Grammars) -> None:
    """Whatever our own reading of a schema has missed."""
    grammars.compile(Structure("regex", "ab"))  # the process is up
    compiler = grammars._compiler
    assert compiler is not None
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot be said whole: multipleOf is not supported"):
            compiler.compile(schema({"type": "number", "multipleOf": 2}))
        assert compiler.compile(schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}))


def test_a_grammar_that_is_too_large_is_given_up(tiny_tokenizer: ChatTokenizer) -> None:
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(grammar_bytes=50))
    try:
        with pytest.raises(InvalidRequest, match="bytes, more than 50"):
            grammars.compile(Structure("regex", "ab"))
    finally:
        grammars.close()


def test_equal_sources_are_compiled_once(grammars: Grammars) -> None:
    one, other = Structure("regex", "abc"), Structure("regex", "abc", field="tools", begins_after=5)
    compiled = grammars.compile(one)
    assert grammars.known(other) is not None
    assert grammars.compile(other) is compiled


def test_preparing_tells_when_it_is_done_and_keeps_a_refusal(grammars: Grammars) -> None:
    for structure in (Structure("regex", "xyz+"), Structure("regex", "xyz(")):
        done = threading.Event()
        grammars.prepare(structure, lambda _, done=done: done.set())
        assert done.wait(60)
        assert grammars.known(structure) is not None


def test_a_refusal_is_told_whoever_waits_for_it_however_many_come_between(
    tiny_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread asks for it only after them, and must not compile then."""
    monkeypatch.setattr("engine.sampling.grammars._MAX_REFUSALS", 1)
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS})
    try:
        outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
        waiting = Structure("regex", "waits(")
        grammars.prepare(waiting, outcomes.put)
        grammars.prepare(Structure("regex", "between("), outcomes.put)
        held = [outcomes.get(timeout=60), outcomes.get(timeout=60)]
        assert grammars.known(waiting) is not None
        monkeypatch.setattr(grammars, "_compile", lambda _: pytest.fail("compiled again"))
        with pytest.raises(InvalidRequest, match="parenthesis is not closed"):
            grammars.compile(waiting)
        held.clear()
        assert grammars.known(waiting) is None
    finally:
        grammars.close()


def test_a_grammar_that_takes_too_long_to_follow_ends_its_output(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling.matcher._MOST_S", 0.0)
    structure = Structure("regex", "ab", field="structured_outputs.regex")
    with pytest.raises(GrammarStuck, match="more than 0 s to follow") as stuck:
        grammars.matcher(structure).allowed()
    assert stuck.value.parameter == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(={0,20}){0,20}b"),  # 20 s for the first token of smollm2's vocabulary
        ("regex", "(={1,60}){1,60}b"),
        ("regex", "zq(={0,20}){0,20}b"),
        ("grammar", 'root ::= [a-p]{3} "zq" a{0,20} "b"\na ::= "="{0,20}'),
    ],
)
def test_a_grammar_that_would_hold_up_an_engine_is_refused_where_it_is_compiled(
    runs: Grammars, kind: StructureKind, source: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequest, match="too long to follow, over") as slow:
            runs.compile(Structure(kind, source, "structured_outputs.regex"))
        assert str(slow.value).count("use a simpler one") == 1
        assert str(slow.value).startswith(f"structured_outputs.regex: the {kind} cannot be compiled: it ta")


@pytest.fixture(scope="module")
def runs() -> Iterator[Grammars]:
    """Of a vocabulary in which characters come in runs, as in those of large models."""
    tokens = [bytes([code]) for code in range(128)] + [b"=" * length for length in range(2, 40)]
    made = Grammars(lambda: [*tokens, b""], {len(tokens)})
    yield made
    made.close()


def test_a_grammar_that_is_slow_all_the_same_ends_its_output_and_is_refused_from_then_on(
    runs: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a token that no try comes to. The thread of the call works on, and answers nobody."""
    monkeypatch.setattr("engine.sampling.matcher._MOST_CALL_S", 0.01)
    structure = Structure("regex", "([^q].*|q(={0,16}){0,16}b)", "structured_outputs.regex")
    matcher = runs.matcher(structure)
    matcher.follow([ord("q")])
    with pytest.raises(GrammarStuck, match=r"takes too long to follow: more than 0\.01 s for one token"):
        matcher.allowed()
    with pytest.raises(InvalidRequest, match="takes too long to follow"):
        runs.matcher(structure)  # though `matcher` still holds what has been compiled
    monkeypatch.undo()
    ab = runs.matcher(Structure("regex", "ab"))
    ab.follow([ord("a")])
    allowed = ab.allowed()
    assert allowed is not None
    assert np.flatnonzero(allowed).tolist() == [ord("b")]


def test_an_output_that_can_neither_go_on_nor_end_is_told() -> None:
    """A vocabulary without the letter that comes next."""
    poor = Grammars(lambda: [b"a", b"b", b""], {2})
    try:
        matcher = poor.matcher(Structure("regex", "axb"))
        matcher.follow([0])
        with pytest.raises(GrammarStuck, match="neither go on nor end"):
            matcher.allowed()
    finally:
        poor.close()


@pytest.mark.timeout(200)
def test_closing_does_not_wait_for_a_grammar(tiny_tokenizer: ChatTokenizer) -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(seconds=250.0))
    grammars.compile(Structure("regex", "ab"))  # the process is up
    grammars.prepare(schema(wide), lambda _: None)
    grammars.close()  # within the test's time, whether the thread has begun or not
