"""Text from tokens as they come, cut at the first stop string.

A delta never ends inside a UTF-8 sequence, and never holds text that could still become a stop string.
"""

from collections.abc import Sequence

from engine.chat.tokenizer import ChatTokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """One output. `text` is what has been given out; after `stopped` nothing more comes."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(string for string in stop if string)
        self._ids: list[int] = []
        self._prefix = 0  # ids before it are decoded for good
        self._read = 0
        self._held = ""  # decoded, and could be the start of a stop string
        self._given: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._given)

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """The text that these tokens make certain. `final` gives out what was held back."""
        if self.stopped:
            return ""
        self._ids += token_ids
        return self._release(self._decode(final), final)

    def _decode(self, final: bool) -> str:
        """Newly decoded text, empty while a character is incomplete.

        Decoding starts a few tokens back, since a token's text can depend on the one before it.
        """
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        if now.endswith(_REPLACEMENT) and not final:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _release(self, new: str, final: bool) -> str:
        text = self._held + new
        # The stop string that is complete first wins: which one that is does not depend on where text is cut.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            text = text[: min(found)[1]]
        else:
            keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._given.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that starts `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
