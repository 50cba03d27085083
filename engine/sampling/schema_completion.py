"""A schema as xgrammar can read all of it: what it would leave out without a word is written where it looks.

A required name that is no property becomes one, of what the schema says of others; of listed values those
stay that are of the schema's type.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

_Reader = Callable[[object], object]


class Unsatisfiable(ValueError):
    """No value is of the schema, and why."""


def completed(fields: Mapping[str, Any], read: _Reader) -> dict[str, Any]:
    """Of one schema; `read` does the same to those within. Raises Unsatisfiable."""
    schema = dict(fields)
    for name in MAPS:
        if isinstance(inner := fields.get(name), Mapping):
            schema[name] = {key: read(value) for key, value in cast(Mapping[str, object], inner).items()}
    for name in LISTS:
        if isinstance(inner := fields.get(name), list):
            schema[name] = [read(value) for value in cast(list[object], inner)]
    for name in SINGLE:
        if name in fields:
            schema[name] = read(fields[name])
    _name_required(schema)
    _keep_of_type(schema)
    return schema


# Where schemas stand in a schema.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")


def _name_required(schema: dict[str, Any]) -> None:
    required, named = schema.get("required"), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(named, Mapping):
        return
    names = [name for name in cast(list[object], required) if isinstance(name, str) and name not in named]
    if names:
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        schema["properties"] = {**cast(Mapping[str, Any], named), **dict.fromkeys(names, others)}


def _keep_of_type(schema: dict[str, Any]) -> None:
    types: object = schema.get("type")
    listed = cast(list[object], types) if isinstance(types, list) else [types]
    wanted = {name for name in listed if isinstance(name, str)}
    if not wanted:
        return
    if "const" in schema and not _types_of(schema["const"]) & wanted:
        raise Unsatisfiable(f"its 'const' {schema['const']!r:.80} is not of its 'type'")
    values = schema.get("enum")
    if isinstance(values, list) and values:
        schema["enum"] = [value for value in cast(list[object], values) if _types_of(value) & wanted]
        if not schema["enum"]:
            raise Unsatisfiable("none of its 'enum' is of its 'type'")


def _types_of(value: object) -> set[str]:
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return _TYPES.get(type(value), set())


_TYPES: dict[type, set[str]] = {
    type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"},
    list: {"array"}, dict: {"object"},
}  # fmt: skip
