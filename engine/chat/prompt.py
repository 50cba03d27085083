"""Messages to prompt ids, in which control tokens stand only where the template put them.

A message that holds `<|im_end|>` would otherwise end its own turn and open another one, as the system, say.
A mark is set into such strings before rendering, so that they are none; the control tokens of the rendered
text are then the template's own, and the mark is taken out of the text between them. That text is encoded as
it always is, so prompts without such strings have the ids that they had. The message arrives unchanged: the
model reads the characters.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of the rendered conversation. Raises InvalidRequest where the template refuses it.

    `variables`: what else the template may write, such as tools.

    Takes CPU time in proportion to the text, and in the template without bound: it is a program of the model
    file. Call it from a thread: tokenising lets other threads run.
    """
    mark = f"\ufdd0{secrets.token_hex(8)}"  # a noncharacter and a number that no message can know
    begins = _beginnings(tokenizer.control)
    marked = [_marked(message, begins, mark) for message in messages]
    more = {"variables": _marked(variables, begins, mark)} if variables else {}
    return tokenizer.encode(template.render(marked, **more), omit=mark)


def _marked(value: Any, begins: re.Pattern[str], mark: str) -> Any:
    """With the mark in every string, names of fields included where a client chooses them."""
    match value:
        case str():
            return begins.sub(lambda found: found[0] + mark, value)
        case Mapping():
            fields = cast(Mapping[str, Any], value)
            return {_marked(k, begins, mark): _marked(v, begins, mark) for k, v in fields.items()}
        case list():
            return [_marked(item, begins, mark) for item in cast(list[Any], value)]
        case _:
            return value


def _beginnings(control: Collection[str]) -> re.Pattern[str]:
    """The first character of each control string, and of each that the text's end cuts off.

    What follows a message in the template could complete the latter.
    """
    whole = [re.escape(token[1:]) for token in control]
    cut = [rf"{re.escape(token[1:end])}\Z" for token in control for end in range(1, len(token))]
    firsts = "".join(re.escape(first) for first in {token[0] for token in control})
    return re.compile(f"[{firsts}](?={'|'.join((*whole, *cut))})" if control else "(?!)")
