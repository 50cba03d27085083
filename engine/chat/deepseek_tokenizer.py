"""A checkpoint's tokenizer.json, run by the `tokenizers` library.

The file calls only some of its control tokens special; turn markers and think tags it would find in any text.
Here every added token is one: none is recognised in ordinary text, and of a reply's only the markup is shown.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from engine.chat.deepseek_prompt import END, THINK, THOUGHT
from engine.chat.dsml import MARKER
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import BrokenModelFile

_MARKUP = (THINK, THOUGHT, MARKER)  # what the parser of a reply looks for


class MarkupTokenizer(ChatTokenizer):
    """A ChatTokenizer whose decoded text keeps the markup of reasoning and calls."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int, control: Mapping[str, int], longest: int) -> None:
        super().__init__(tokenizer, eos_id, control, longest)
        self._plain = tokenizer
        self._hidden = frozenset(index for token, index in control.items() if token not in _MARKUP)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids with think tags and the DSML marker, without the other control tokens."""
        shown = [index for index in ids if index not in self._hidden]
        return self._plain.decode(shown, skip_special_tokens=False)

    def _is_hidden(self, index: int) -> bool:
        return index in self._hidden


def load_tokenizer(checkpoint: Path) -> ChatTokenizer:
    """The tokenizer of a checkpoint's folder. Raises BrokenModelFile.

    A file of a few megabytes takes about a second.
    """
    path = checkpoint / "tokenizer.json"
    try:
        raw: object = json.loads(path.read_bytes())
        added = [cast(dict[str, Any], token) for token in cast(Any, raw)["added_tokens"]]
        for token in added:
            token.update(special=True, normalized=False)
        control = {str(token["content"]): int(token["id"]) for token in added}
        tokenizer = Tokenizer.from_str(json.dumps(raw))
    except OSError as error:
        raise BrokenModelFile(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # the library raises bare Exception for whatever it dislikes
        raise BrokenModelFile(f"{path}: not a tokenizer file ({error})") from error
    if END not in control:
        raise BrokenModelFile(f"{path}: no token {END!r}, which ends a reply")
    tokenizer.encode_special_tokens = True  # as text: where control tokens stand, the prompt says
    longest = _longest(tokenizer.get_vocab(with_added_tokens=False))
    return MarkupTokenizer(tokenizer, control[END], control, longest)


def _longest(vocabulary: Collection[str]) -> int:
    return max(map(len, vocabulary), default=1)
