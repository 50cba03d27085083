"""What the documents of a policy have in common: they are checked when they are made, and never change."""

import reprlib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox.errors import InvalidArgument

_HINT = "docs/sandbox.md and docs/egress.md have all fields, with examples"


class Document(BaseModel):
    """InvalidArgument names the first field that is wrong, and its value. Immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if not TYPE_CHECKING:  # where the fields of each class say what it takes

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise refusal(error) from None

        # A document within another one is checked as its part, and named as such.
        __init__.__pydantic_base_init__ = True


def refusal(error: ValidationError) -> InvalidArgument:
    """The first field that is wrong, as the caller would write it."""
    found = error.errors(include_url=False)
    first = next((each for each in found if not _is_other_form(each["loc"])), found[0])
    field = ".".join(str(part) for part in first["loc"] if not _is_form(part)) or "policy"
    value, why = reprlib.repr(first["input"]), first["msg"].removeprefix("Value error, ")
    said = f"{field}: {why}" if field == "policy" or first["type"] == "missing" else f"{field}={value}: {why}"
    return InvalidArgument(said, hint=_HINT)


def _is_form(part: int | str) -> bool:
    """Of a field that may be one thing or another, pydantic puts the tried one into the field's name."""
    return isinstance(part, str) and (part[:1].isupper() or part.startswith("literal["))


def _is_other_form(names: tuple[int | str, ...]) -> bool:
    return any(isinstance(part, str) and part.startswith("literal[") for part in names)
