"""Renders messages to the prompt text with the Jinja template that a model's file carries."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import BrokenModelFile, InvalidRequest

# A template is a program: besides its own refusals, it can trip over a message that it does not expect.
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class ChatTemplate:
    """A compiled template. It comes from a file of unknown origin, so it runs in Jinja's sandbox."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            environment.filters["tojson"] = (
                _json  # Jinja's own escapes for HTML; models are trained on plain JSON
            )
            self._template = environment.from_string(source, {"raise_exception": _raise})
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise BrokenModelFile(f"chat template: {error}") from error
        self._special = dict(special)
        self.takes_tools = "tools" in variables  # whether it writes a request's tools itself

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Raises InvalidRequest where the template refuses it.

        `variables`: what else a request says, such as `tools`; a template that does not know one ignores it.
        """
        try:
            return self._template.render(
                **(variables or {}),
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"messages: the model's template refuses them: {error}", parameter="messages"
            ) from error


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
