"""A prompt as a row of pieces: control tokens are recognised in pieces of ours and nowhere else.

So a message that holds `<｜User｜>` cannot open a turn; the model reads its characters. Text between two
control tokens is tokenised as one, whoever wrote its parts. Source of the tokens: fact sheet, section 10.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter

from engine.chat.dsml import MARKER
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import BrokenModelFile

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"
_TASK_TOKENS = tuple(
    f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")
)
_CONTROL = (BEGIN, END, SYSTEM, USER, ASSISTANT, THINK, THOUGHT, MARKER, *_TASK_TOKENS)
_SPLIT = re.compile(f"({'|'.join(map(re.escape, _CONTROL))})")


@dataclass(frozen=True, slots=True)
class Piece:
    """`ours`: control strings in it are tokens; otherwise they are text."""

    text: str
    ours: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """`thinking`: the reply begins within `<think>`, as its parser must know."""

    pieces: tuple[Piece, ...]
    thinking: bool

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def ids(self, tokenizer: ChatTokenizer) -> list[int]:
        """Raises BrokenModelFile where the tokenizer lacks one of the control tokens."""
        ids: list[int] = []
        text = ""
        for part, is_token in self._parts():
            if not is_token:
                text += part
                continue
            if part not in tokenizer.control:
                raise BrokenModelFile(f"tokenizer: no token {part!r}, which the model's chat format needs")
            ids += [*tokenizer.encode_text(text), *tokenizer.encode(part)]
            text = ""
        return ids + tokenizer.encode_text(text)

    def _parts(self) -> Iterator[tuple[str, bool]]:
        for piece in self.pieces:
            for index, part in enumerate(_SPLIT.split(piece.text) if piece.ours else [piece.text]):
                yield part, index % 2 == 1


def filled(template: str, **values: str) -> Iterator[Piece]:
    """A text of the release or ours with its fields filled in; what a client sent stays the client's."""
    for literal, field, _, _ in Formatter().parse(template):
        yield ours(literal)
        if field is not None:
            yield Piece(values[field], ours=field not in ("tool_schemas", "schema"))


def ours(text: str) -> Piece:
    return Piece(text, ours=True)


def theirs(text: str) -> Piece:
    return Piece(text, ours=False)
