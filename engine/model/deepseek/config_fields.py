"""Fields of a JSON object with their types checked: each fault names field, value and what is expected."""

import sys
from collections.abc import Mapping
from typing import cast

from engine.errors import BrokenModelFile

_ABSENT = object()
_LARGEST = sys.float_info.max  # JSON has integers beyond it


def refuse(field: str, value: object, expected: str) -> BrokenModelFile:
    """The error of a field; the caller raises it."""
    return BrokenModelFile(f"config: field {field!r} is {value!r:.200}, expected {expected}")


class Fields:
    """One object of a config. `path` goes before its fields' names in errors."""

    def __init__(self, raw: object, path: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise refuse(path.rstrip(".") or "the whole", raw, "an object")
        self.raw = cast(Mapping[str, object], raw)
        self._path = path

    def __contains__(self, name: object) -> bool:
        return self.raw.get(cast(str, name)) is not None

    def inside(self, name: str) -> "Fields":
        """The object in a field."""
        return Fields(self._get(name, _ABSENT, "an object"), f"{self._path}{name}.")

    def text(self, name: str, default: object = _ABSENT) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self._refuse(name, value, "a string")
        return value

    def flag(self, name: str, default: object = _ABSENT) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true or false")
        return value

    def integer(self, name: str, default: object = _ABSENT, *, least: int = 1) -> int:
        expected = f"an integer of at least {least}"
        value = self._get(name, default, expected)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._refuse(name, value, expected)
        return value

    def number(self, name: str, default: object = _ABSENT) -> float:
        value = self._get(name, default, "a positive number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self._refuse(name, value, "a positive number")
        return float(value)

    def integers(self, name: str, default: object = _ABSENT) -> tuple[int, ...]:
        expected = "a list of integers of at least 0"
        value = self._get(name, default, expected)
        if not isinstance(value, list | tuple):
            raise self._refuse(name, value, expected)
        items = list(cast(list[object], value))
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            raise self._refuse(name, items, expected)
        return tuple(cast(list[int], items))

    def only(self, name: str, allowed: object, default: object = _ABSENT) -> None:
        """Refuses every value but one: the others compute something else."""
        value = self._get(name, default, repr(allowed))
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise self._refuse(name, value, f"{allowed!r}: nothing else is supported")

    def _get(self, name: str, default: object, expected: str) -> object:
        value = self.raw.get(name, default)
        if value is None and default is not _ABSENT:
            value = default
        if value is _ABSENT:
            raise BrokenModelFile(f"config: field {self._path + name!r} is missing, expected {expected}")
        return value

    def _refuse(self, name: str, value: object, expected: str) -> BrokenModelFile:
        return refuse(self._path + name, value, expected)
