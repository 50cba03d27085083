"""Keywords of JSON Schema that hold by themselves and not beside each other: refused by name.

Found by trying each pair on xgrammar 0.2.9, which reads one of the two and says nothing, or only on stderr.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from engine.sampling.pattern import faults_of_pattern

# Others are annotations, as the standard has it.
_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
     "uri-template", "uuid", "json-pointer", "relative-json-pointer")
)  # fmt: skip
_TEXT_BOUNDS = ("pattern", "minLength", "maxLength")
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_CONTENT = (
    *_TEXT_BOUNDS, *_RANGES, "multipleOf", "format", "properties", "patternProperties", "required", "items",
    "additionalProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems", "minItems",
    "maxItems", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
# Where our reading of a schema comes by: whatever else a pointer leads to has been looked at by nobody.
_REFERENCE = re.compile(
    r"#(/(\$defs|definitions|properties|patternProperties)/[^/]+|/(anyOf|oneOf|allOf|prefixItems)/\d+"
    r"|/(items|additionalProperties|unevaluatedProperties|unevaluatedItems|propertyNames))*"
)


def faults_of_values(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    """Of references, texts, numbers and listed values."""
    reference = fields.get("$ref")
    if isinstance(reference, str) and not _REFERENCE.fullmatch(reference):
        yield f"{where} has the '$ref' {reference!r:.80}; only schemas of this one are supported, by '#/…'"
    if isinstance(pattern := fields.get("pattern"), str):
        for fault in faults_of_pattern(pattern, in_json=True):
            yield f"{where} has a 'pattern' that {fault}"
    if "pattern" in fields and ("minLength" in fields or "maxLength" in fields):
        yield f"{where} has 'pattern' and a length, of which only one is supported"
    if isinstance(form := fields.get("format"), str) and form in _FORMATS:
        for name in _TEXT_BOUNDS:
            if name in fields:
                yield f"{where} has {name!r} beside 'format', of which only one is supported"
        if "type" not in fields and not fields.keys() & {"enum", "const"}:
            yield f"{where} has 'format' without 'type', which is not supported"
    yield from _faults_of_multiples(fields, where)
    listed = next((name for name in ("const", "enum") if name in fields), None)
    if listed is not None:
        others = [name for name in (*_OF_CONTENT, "enum", "const") if name in fields and name != listed]
        if others:
            yield f"{where} has {others[0]!r} beside {listed!r}, which is not supported"


def _faults_of_multiples(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    if "multipleOf" not in fields:
        return
    types = fields.get("type")
    number = fields["multipleOf"]
    if types == "number" or (isinstance(types, list) and "number" in types):
        yield f"{where} has 'multipleOf' for the type 'number'; it is supported for integers"
    if isinstance(number, float) and not number.is_integer():
        yield f"{where} has the 'multipleOf' {number!r}; only whole numbers are supported"
    if beside := next((name for name in _RANGES if name in fields), None):
        yield f"{where} has {beside!r} beside 'multipleOf', of which only one is supported"


def faults_of_names(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    """Of objects' names: which there are, which there must be, and what they are like."""
    named: object = fields.get("properties") or {}
    patterns: object = fields.get("patternProperties") or {}
    if not isinstance(named, Mapping) or not isinstance(patterns, Mapping):
        return  # the compiler says so
    names, shapes = list(cast(Mapping[str, Any], named)), cast(Mapping[str, Any], patterns)
    for pattern in shapes:
        for fault in faults_of_pattern(pattern, in_json=True):
            yield f"{where} has a 'patternProperties' that {fault}"
    if len({repr(shape) for shape in shapes.values()}) > 1:
        yield f"{where} has several 'patternProperties', which may overlap; one is supported"
    if names and shapes:
        yield f"{where} has 'patternProperties' beside 'properties', of which only one is supported"
    if "propertyNames" in fields and (names or shapes):
        yield f"{where} has 'propertyNames' beside names that are given, of which only one is supported"
    # A name that is free may come twice, and counts once then.
    least = fields.get("minProperties")
    if isinstance(least, int | float) and least > 1 and (shapes or takes_others(fields)):
        yield f"{where} has 'minProperties' of {least} where names are free, which is not supported"
    yield from _faults_of_required(fields, names, where)


def _faults_of_required(fields: Mapping[str, Any], names: list[str], where: str) -> Iterator[str]:
    required = fields.get("required")
    if not isinstance(required, list):
        return
    for name in cast(list[object], required):
        if name in names or not isinstance(name, str):
            continue
        if fields.get("patternProperties") or "propertyNames" in fields:
            yield f"{where} requires {name!r}, which is none of 'properties'; that is not supported here"
        elif fields.get("additionalProperties") is False or fields.get("unevaluatedProperties") is False:
            yield f"{where} requires {name!r}, which is none of 'properties', and allows no others"


def takes_others(fields: Mapping[str, Any]) -> bool:
    """Whether the grammar lets names come that are not given; without a word of them it does not."""
    return "propertyNames" in fields or any(
        fields.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties")
    )
