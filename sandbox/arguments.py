"""Arguments of callers, looked at where they come in: what is wrong is an error there, by its field's name,
and not a fault of the thread that comes upon it later. Nobody's text is shown: it may be a secret."""

from types import NoneType

from sandbox.errors import InvalidArgument

_WORDS = {NoneType: "None", str: "text", int: "a whole number", float: "a number"}


def check_type(field: str, value: object, *kinds: type) -> None:
    """InvalidArgument for a value of none of these types. A truth value is no number."""
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    wanted = " or ".join(dict.fromkeys(_WORDS.get(each, each.__name__) for each in kinds))
    raise InvalidArgument(f"{field} is of type {type(value).__name__}", hint=f"give {wanted}")


def check_whole(field: str, value: object, least: int, most: int) -> None:
    """InvalidArgument for all but a whole number of these and what is between."""
    check_type(field, value, int)
    if isinstance(value, int) and not least <= value <= most:
        raise InvalidArgument(f"{field}={value} is out of range", hint=f"use {least:,} to {most:,}")


def check_seconds(field: str, value: object, most: float, *, or_zero: bool = False) -> None:
    """InvalidArgument for all but None, which says something, and a time above 0 or from there."""
    check_type(field, value, int, float, NoneType)
    if isinstance(value, int | float) and not (0 < value <= most or (value == 0 and or_zero)):
        raise InvalidArgument(f"{field}={value} is out of range", hint=f"use seconds, up to {most:,.0f}")
