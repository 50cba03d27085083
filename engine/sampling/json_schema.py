"""What of JSON Schema our grammars cannot say: refused by name, since an output may then break the schema.

Found by trying each keyword on xgrammar 0.2.9. Not refused: unknown `format`s, which the standard calls
annotations, and `oneOf`, which is read as `anyOf` where its branches overlap.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from engine.sampling.grammar_compiler import refused
from protocol.sampling import Structure

_MISSING = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
     "$comment", "$defs", "definitions", "discriminator", "strict", "nullable")
)  # fmt: skip
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")  # beside them only annotations are read
_NEED_TYPE = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "minItems", "maxItems", "required", "minProperties", "maxProperties",
)  # fmt: skip
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")


def check_schema(structure: Structure) -> None:
    """Of a schema, or of all in a structural tag. Raises InvalidRequest that names place and keyword."""
    try:
        value: object = json.loads(structure.source)
        json.dumps(value, ensure_ascii=False).encode()
        faults = _faults(value, "schema") if structure.kind == "json_schema" else _faults_in_tag(value)
        fault = next(faults, None)
    except UnicodeEncodeError as error:  # from an escape; the source itself has been looked at
        half = error.object[error.start]
        raise refused(structure, f"it has half a surrogate pair, {half!r}, which has no UTF-8") from error
    except ValueError as error:
        raise refused(structure, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise refused(structure, "it is nested too deeply") from error
    if fault is not None:
        raise refused(structure, fault, "leave it out, and check the output for it")


def _faults_in_tag(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in cast(list[object], value):
            yield from _faults_in_tag(item)
    if not isinstance(value, Mapping):
        return
    fields = cast(Mapping[str, object], value)
    if fields.get("type") == "json_schema" and "json_schema" in fields:
        yield from _faults(fields["json_schema"], "schema")
        return
    for item in fields.values():
        yield from _faults_in_tag(item)


def _faults(schema: object, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where} is {schema!r:.40}, expected an object"
        return
    fields = cast(Mapping[str, Any], schema)
    yield from _faults_here(fields, where)
    for name in _MAPS:
        if isinstance(inner := fields.get(name), Mapping):
            for key, value in cast(Mapping[str, object], inner).items():
                yield from _faults(value, f"{where}.{name}.{key}")
    for name in _LISTS:
        if isinstance(inner := fields.get(name), list):
            for index, value in enumerate(cast(list[object], inner)):
                yield from _faults(value, f"{where}.{name}[{index}]")
    for name in _SINGLE:
        if name in fields:
            yield from _faults(fields[name], f"{where}.{name}")


def _faults_here(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in _MISSING:
        if name in fields:
            yield f"{where} has {name!r}, which is not supported"
    if fields.get("uniqueItems"):
        yield f"{where} has 'uniqueItems', which is not supported"
    if "pattern" in fields and ("minLength" in fields or "maxLength" in fields):
        yield f"{where} has 'pattern' and a length, of which only one is supported"
    if isinstance(fields.get("allOf"), list) and len(fields["allOf"]) > 1:
        yield f"{where} has 'allOf' of more than one schema, which is not supported"
    alone = next((name for name in _ALONE if name in fields), None)
    if alone is not None and (beside := fields.keys() - _ANNOTATIONS - {alone}):
        yield f"{where} has {min(beside)!r} beside {alone!r}, which is not supported"
    if not fields.keys() & {"type", "properties", "items", "prefixItems", "enum", "const"}:
        for name in _NEED_TYPE:
            if name in fields:
                yield f"{where} has {name!r} without 'type', which is not supported"
