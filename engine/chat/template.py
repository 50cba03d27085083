"""Renders messages to the prompt text with the Jinja template that a model's file carries."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import BrokenModelFile, InvalidRequest

# A template is a program: besides its own refusals, it can trip over a message that it does not expect.
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class ChatTemplate:
    """A compiled template. It comes from a file of unknown origin, so it runs in Jinja's sandbox."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            self._template = environment.from_string(source, {"raise_exception": _raise})
        except TemplateError as error:
            raise BrokenModelFile(f"chat template: {error}") from error
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises InvalidRequest where the template refuses it."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"messages: the model's template refuses them: {error}", parameter="messages"
            ) from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
