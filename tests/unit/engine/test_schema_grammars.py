"""What a schema's grammar lets through is of the schema, and what it cannot say is refused by name."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.sampling.grammars import Grammars
from engine.sampling.json_schema import read_schema
from protocol.sampling import Structure, StructureKind

END = 256
TEXT = {"type": "string"}
WHOLE = {"type": "integer"}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: [*(bytes([code]) for code in range(END)), b""], {END})
    yield made
    made.close()


def drawn(grammars: Grammars, structure: Structure, seed: int, most: int = 200) -> str | None:
    """An output by chance, of characters that a keyboard has where there are any; None: it is too long."""
    random, matcher, written = np.random.default_rng(seed), grammars.matcher(structure), bytearray()
    closing = [END, *b'"}]']
    for step in range(most):
        allowed = matcher.allowed()
        ids = np.arange(END + 1) if allowed is None else np.flatnonzero(allowed)
        ends = [token for token in closing if token in ids]
        plain = ids[(ids < 128) | (ids == END)]
        usual = plain if len(plain) else ids
        token = ends[0] if ends and (step > 30 or random.random() < 0.25) else int(random.choice(usual))
        if token == END:
            return written.decode()
        written.append(token)
        matcher.follow([token])
    return None


SAYABLE: list[dict[str, Any]] = [
    {"type": "object", "required": ["z"]},
    {"type": "object", "required": ["z"], "properties": {}, "additionalProperties": WHOLE},
    {"type": "object", "required": ["a", "z"], "properties": {"a": TEXT}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}, "required": ["a"]},
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^a": WHOLE, "b$": WHOLE}},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}},
    {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "maxProperties": 1},
    {"type": "object", "additionalProperties": WHOLE},
    {"type": "string", "enum": ["a", 1, None]},
    {"type": ["string", "null"], "enum": ["a", 1, None]},
    {"type": "integer", "const": 3},
    {"enum": ['"', "\\", "\n", {"a": [1, "é"]}]},
    {"type": "string", "pattern": "^[ -~]{1,4}$"},
    {"type": "string", "pattern": '^["x]+$'},
    {"type": "string", "pattern": r"^[\s\S]{2}.\W\D$"},
    {"type": "string", "pattern": r"^\w+@\x41[^a]{0,3}$"},
    {"type": "string", "pattern": "a|^b$|c"},
    {"type": "string", "minLength": 1, "maxLength": 3},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid", "email")),
    {"type": "string", "format": "password", "minLength": 8},
    {"type": "array", "prefixItems": [{"type": "string", "pattern": "^[a-c]$"}, {**TEXT, "maxLength": 2}]},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2},
    {"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [TEXT, WHOLE], "items": {"type": "null"}, "minItems": 2},
    {"type": "array", "prefixItems": [TEXT], "items": False},
    {"anyOf": [WHOLE, {"type": "array", "items": TEXT}]},
    {"allOf": [{"type": "integer", "minimum": 3}]},
    {"$ref": "#/$defs/a/properties/x~1y", "$defs": {"a": {"properties": {"x/y": WHOLE}}}},
    {
        "type": "object",
        "properties": {"next": {"$ref": "#"}},
        "required": ["v"],
        "additionalProperties": WHOLE,
    },
]


@pytest.mark.parametrize("schema", SAYABLE, ids=lambda value: json.dumps(value)[:60])
def test_whatever_the_grammar_lets_through_is_of_the_schema(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    structure = Structure("json_schema", json.dumps(schema))
    whole = 0
    for seed in range(25):
        text = drawn(grammars, structure, seed)
        if text is None:
            continue
        whole += 1
        jsonschema.validate(json.loads(text), schema)
    assert whole


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "requires 'z'"),
        ({"type": "object", "required": ["z"], "patternProperties": {"z": {}}}, "requires 'z'"),
        ({"type": "object", "required": ["z"], "propertyNames": {"pattern": "a"}}, "requires 'z'"),
        ({"type": "object", "patternProperties": {"^a": WHOLE, "a$": TEXT}}, "several 'patternProperties'"),
        ({"properties": {"a": WHOLE}, "patternProperties": {"a": TEXT}}, "'patternProperties' beside"),
        ({"properties": {"a": WHOLE}, "propertyNames": {"pattern": "b"}}, "'propertyNames' beside"),
        ({"type": "object", "minProperties": 2, "additionalProperties": True}, "'minProperties' of 2"),
        ({"type": "string", "pattern": '^"+x$'}, "schema has a 'pattern' that has '\"'"),
        ({"type": "string", "pattern": r"^\\d$"}, r"has '\\\\'"),
        ({"type": "string", "pattern": r"^\t$"}, r"has '\\t'"),
        ({"type": "string", "pattern": "^a\nb$"}, r"has '\n'"),
        ({"type": "string", "pattern": r"\x22|\u005c"}, r"has '\\x22'"),
        ({"type": "string", "pattern": r'^["\\\n]$'}, "every character"),
        ({"type": "string", "pattern": r"^[^ !#-\[\]-\u{10ffff}]$"}, "every character"),
        ({"type": "object", "propertyNames": {"pattern": '"'}}, "propertyNames has a 'pattern'"),
        ({"type": "object", "patternProperties": {'"': WHOLE}}, "a 'patternProperties' that has"),
        ({"type": "string", "pattern": "a^b"}, "'^' in its middle"),
        ({"type": "string", "pattern": "^(?=a).*$"}, "ookahead"),
        ({"type": "string", "pattern": "^(?!ab)[a-z]+$"}, "ookahead"),
        ({"type": "string", "format": "date", "pattern": "x"}, "'pattern' beside 'format'"),
        ({"type": "string", "format": "uri", "minLength": 3}, "'minLength' beside 'format'"),
        ({"format": "date"}, "'format' without 'type'"),
        ({"$ref": "https://example.org/a"}, "the '$ref' 'https://example.org/a'"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "the '$ref' '#name'"),
        ({"properties": {"a": {"$ref": "#/x"}}, "x": {"not": {}}}, "the '$ref' '#/x'"),
        ({"type": "string", "const": 3}, "'const' 3 is not of its 'type'"),
        ({"type": "string", "enum": [3, None]}, "none of its 'enum'"),
        ({"type": "integer", "minimum": 3, "enum": [1, 5]}, "'minimum' beside 'enum'"),
        ({"const": 1, "enum": [1, 2]}, "'enum' beside 'const'"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf' for the type 'number'"),
        ({"type": "integer", "multipleOf": 2.5}, "the 'multipleOf' 2.5"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "'minimum' beside 'multipleOf'"),
        ({"type": [], "minimum": 3}, "'minimum' without 'type'"),
        ({"allOf": []}, "'allOf'"),
    ],
)
def test_what_a_grammar_would_say_wrongly_is_refused_by_name(
    grammars: Grammars, value: dict[str, Any], told: str
) -> None:
    for inner, where in ((value, "schema"), ({"type": "array", "items": value}, "schema.items")):
        with pytest.raises(InvalidRequest, match=re.escape(told).replace("schema", where)):
            grammars.compile(Structure("json_schema", json.dumps(inner)))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (r"\Aab\Z", r"has '\\A', an escape"),
        (r"\Qa.b\E", r"has '\\Q'"),
        (r"a\012", r"has '\\0'"),
        ("a^b", "'^' in its middle"),
        ("(a$)", "'$' in its middle"),
        ("[[:alpha:]]", "a class by name"),
        (r"[\Z]", r"has '\\Z'"),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "structural_tag"])
def test_a_regex_that_would_be_read_as_another_is_refused(
    grammars: Grammars, kind: StructureKind, pattern: str, told: str
) -> None:
    source = pattern
    if kind == "structural_tag":
        source = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        grammars.compile(Structure(kind, source))


@pytest.mark.parametrize(
    "pattern", [r"^a$|^b\$$", r"\^[$^]\.\-\_\/", r"[\b\]\\]x", r"\d\W[^\s]\x41\u{41}\cA"]
)
def test_a_regex_that_is_read_as_it_is_goes(grammars: Grammars, pattern: str) -> None:
    assert drawn(grammars, Structure("regex", pattern), 0) is not None


KEYWORDS = st.sampled_from(
    ["type", "enum", "const", "pattern", "format", "required", "properties", "items", "$ref", "allOf",
     "multipleOf", "minProperties", "patternProperties", "additionalProperties", "propertyNames", "minimum",
     "$defs"]
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["string", "#", "^\\", "[", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(value=VALUES)
def test_whatever_is_sent_as_a_schema_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        read_schema(Structure("json_schema", json.dumps(value)))
