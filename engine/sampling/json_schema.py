"""What of JSON Schema our grammars cannot say: refused by name, since an output may then break the schema.

Found by trying each keyword on xgrammar 0.2.9. Not refused: unknown `format`s, which the standard calls
annotations, and `oneOf`, which is read as `anyOf` where its branches overlap.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from engine.sampling.grammar_compiler import refused
from engine.sampling.pattern import faults_of_pattern
from engine.sampling.schema_completion import LISTS, MAPS, SINGLE, Unsatisfiable, completed
from engine.sampling.schema_faults import faults_of_names, faults_of_values
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
_SAY_TYPE = {"type", "properties", "items", "prefixItems", "enum", "const"}


def read_schema(structure: Structure) -> Structure:
    """Of a schema, or of all in a structural tag: the structure whose source says all of it to xgrammar.

    Raises InvalidRequest that names place and keyword.
    """
    is_schema = structure.kind == "json_schema"
    try:
        value: object = json.loads(structure.source)
        json.dumps(value, ensure_ascii=False).encode()
        fault = next(_faults(value, "schema") if is_schema else _faults_in_tag(value), None)
        if fault is not None:
            raise refused(structure, fault, "leave it out, and check the output for it")
        whole = _completed(value) if is_schema else _completed_in_tag(value)
    except UnicodeEncodeError as error:  # from an escape; the source itself has been looked at
        half = error.object[error.start]
        raise refused(structure, f"it has half a surrogate pair, {half!r}, which has no UTF-8") from error
    except Unsatisfiable as error:
        raise refused(structure, str(error), "mend the schema: no value is of it") from error
    except ValueError as error:
        raise refused(structure, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise refused(structure, "it is nested too deeply") from error
    return structure if whole == value else replace(structure, source=json.dumps(whole, ensure_ascii=False))


def check_regex(structure: Structure) -> None:
    """Raises InvalidRequest for what would be read as something else."""
    if (fault := next(faults_of_pattern(structure.source), None)) is not None:
        raise refused(structure, f"it {fault}", "write it without, or escape what is meant as it is")


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
    if fields.get("type") == "regex" and isinstance(pattern := fields.get("pattern"), str):
        yield from (f"a pattern {fault}" for fault in faults_of_pattern(pattern))
    for item in fields.values():
        yield from _faults_in_tag(item)


def _completed_in_tag(value: object) -> object:
    if isinstance(value, list):
        return [_completed_in_tag(item) for item in cast(list[object], value)]
    if not isinstance(value, Mapping):
        return value
    fields = cast(Mapping[str, object], value)
    if fields.get("type") == "json_schema" and "json_schema" in fields:
        return {**fields, "json_schema": _completed(fields["json_schema"])}
    return {name: _completed_in_tag(item) for name, item in fields.items()}


def _completed(schema: object) -> object:
    return completed(cast(Mapping[str, Any], schema), _completed) if isinstance(schema, Mapping) else schema


def _faults(schema: object, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where} is {schema!r:.40}, expected an object"
        return
    fields = cast(Mapping[str, Any], schema)
    yield from _faults_here(fields, where)
    for name in MAPS:
        if isinstance(inner := fields.get(name), Mapping):
            for key, value in cast(Mapping[str, object], inner).items():
                yield from _faults(value, f"{where}.{name}.{key}")
    for name in LISTS:
        if isinstance(inner := fields.get(name), list):
            for index, value in enumerate(cast(list[object], inner)):
                yield from _faults(value, f"{where}.{name}[{index}]")
    for name in SINGLE:
        if name in fields:
            inner = fields[name]
            if name == "propertyNames" and isinstance(inner, Mapping):
                inner = {"type": "string", **cast(Mapping[str, object], inner)}  # what names always are
            yield from _faults(inner, f"{where}.{name}")


def _faults_here(fields: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in _MISSING:
        if name in fields:
            yield f"{where} has {name!r}, which is not supported"
    if fields.get("uniqueItems"):
        yield f"{where} has 'uniqueItems', which is not supported"
    if isinstance(fields.get("allOf"), list) and len(fields["allOf"]) != 1:
        yield f"{where} has 'allOf' of {len(fields['allOf'])} schemas; of one it is supported"
    alone = next((name for name in _ALONE if name in fields), None)
    if alone is not None and (beside := fields.keys() - _ANNOTATIONS - {alone}):
        yield f"{where} has {min(beside)!r} beside {alone!r}, which is not supported"
    if fields.get("type") == [] or not fields.keys() & _SAY_TYPE:
        for name in _NEED_TYPE:
            if name in fields:
                yield f"{where} has {name!r} without 'type', which is not supported"
    yield from faults_of_values(fields, where)
    yield from faults_of_names(fields, where)
