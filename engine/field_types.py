"""Whether the fields of a request are what their annotations say, and its texts have UTF-8.

Python checks neither, and a step is no place to learn of it: every other request is in it too.
"""

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from engine.errors import InvalidRequest

_PLAIN: dict[Any, Any] = {int: Integral, float: Real}  # whole numbers and others of NumPy too
_ELSEWHERE = {"source"}  # of a structure: the grammars name the request's field
_NAMES = {"id": "request_id", "choices": "n"}  # of fields, as clients know them


def check_fields(value: object) -> None:
    """Of a dataclass, and of those within. Raises InvalidRequest that names the first that is another."""
    hints = _hints(type(value))
    for name in (field.name for field in fields(cast("Any", value))):
        found, parameter = getattr(value, name), _NAMES.get(name, name)
        if not _fits(found, hints[name]):
            told = getattr(hints[name], "__name__", "") if isinstance(hints[name], type) else ""
            raise InvalidRequest(
                f"{parameter} is {found!r:.80}; it must be of type {told or hints[name]}", parameter=parameter
            )
        if name not in _ELSEWHERE:
            check_texts(found, parameter)


def check_texts(value: object, parameter: str) -> None:
    """Raises InvalidRequest where one of them has half a surrogate pair. Of whatever else it says nothing."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{parameter} is {value!r:.80}; it has half a surrogate pair, which has no UTF-8",
                parameter=parameter,
            ) from None
    elif isinstance(value, tuple | list):
        parts = cast("Collection[object]", value)
        if not all(issubclass(kind, int) for kind in set(map(type, parts))):  # a prompt is all whole numbers
            for one in parts:
                check_texts(one, parameter)
    elif is_dataclass(value) and not isinstance(value, type):
        check_fields(value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    match get_origin(hint):
        case None:
            return _is(type(value), hint)
        case origin if origin is Literal:
            return value in get_args(hint)
        case origin if origin is UnionType:
            return any(_fits(value, one) for one in get_args(hint))
        case _:  # a tuple; a list serves as well
            return isinstance(value, tuple | list) and _parts_fit(cast("Any", value), get_args(hint))


def _parts_fit(parts: tuple[Any, ...] | list[Any], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is not ...:
        return len(parts) == len(hints) and all(map(cast("Callable[..., bool]", _fits), parts, hints))
    if get_origin(hints[0]) is None:  # a prompt has many: their types are few
        return all(_is(kind, hints[0]) for kind in set(map(type, parts)))
    return all(_fits(part, hints[0]) for part in parts)


def _is(kind: type, hint: Any) -> bool:
    if kind is bool or hint is bool:
        return kind is hint
    return issubclass(kind, _PLAIN.get(hint, hint))
