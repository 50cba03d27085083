"""Text from tokens as they come, cut at the first stop string.

A delta never ends inside a UTF-8 sequence, and never holds text that could still become a stop string.
"""

from collections.abc import Sequence

from engine.chat.tokenizer import ChatTokenizer

_REPLACEMENT = "\ufffd"
_KEPT_TOKENS = 4  # a UTF-8 character has four bytes at most, and a token one at least
_MAX_TOKENS = 64  # where tokens without text, such as control tokens, lie inside of one: it is given up
_AT_ONCE = 32  # tokens decoded together: far fewer than those


class TextStream:
    """One output. `text` is what has been given out; after `stopped` nothing more comes.

    `include_stop`: the text ends with the stop string instead of before it. `min_tokens`: a stop string
    counts only where it is complete after more than so many tokens, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._window: list[int] = []  # the newest ids: what comes is decoded behind them
        self._num_given = 0  # characters of the window's text that have been given out
        self._held = ""  # decoded, and could be the start of a stop string
        self._given: list[str] = []
        self.stopped = False
        self.matched = ""  # the stop string that ended the text

    @property
    def text(self) -> str:
        return "".join(self._given)

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """The text that these tokens make certain. `final` gives out what was held back."""
        if self.stopped:
            return ""
        exempt = max(self._min_tokens - self._num_tokens, 0)
        self._num_tokens += len(token_ids)
        if 0 < exempt < len(token_ids):
            return self._push(token_ids[:exempt], False, False) + self._push(token_ids[exempt:], final, True)
        return self._push(token_ids, final, exempt == 0)

    def _push(self, token_ids: Sequence[int], final: bool, may_stop: bool) -> str:
        new, start = "", 0
        while start + _AT_ONCE < len(token_ids):
            self._window += token_ids[start : start + _AT_ONCE]
            new += self._decode(False)
            start += _AT_ONCE
        self._window += token_ids[start:]
        return self._release(new + self._decode(final), final, may_stop)

    def _decode(self, final: bool) -> str:
        """Newly decoded text, without an end that may be an incomplete character.

        Decoding starts a few tokens back, since a token's text can depend on the one before it. What lies
        before those never changes any more, whatever it decodes to, so the window stays short.
        """
        text = self._tokenizer.decode(self._window)
        # A byte-level tokenizer decodes an incomplete character, of one to three bytes, to one U+FFFD.
        is_open = text.endswith(_REPLACEMENT) and not final and len(self._window) <= _MAX_TOKENS
        certain = len(text) - is_open
        new, rest = text[self._num_given : certain], text[certain:]
        self._num_given = certain
        kept = self._window[-_KEPT_TOKENS:]
        kept_text = self._tokenizer.decode(kept)
        if kept_text.endswith(rest):
            self._window, self._num_given = kept, len(kept_text) - len(rest)
        return new

    def _release(self, new: str, final: bool, may_stop: bool) -> str:
        text = self._held + new
        # The stop string that is complete first wins: which one that is does not depend on where text is cut.
        # What is held back could have become one, and was none: none ends within it.
        found = [
            (at + len(stop), at)
            for stop in self._stop
            if (at := text.find(stop, max(len(self._held) - len(stop) + 1, 0))) >= 0
        ]
        if found and may_stop:
            end, at = min(found)
            self.stopped, self.matched, self._held = True, text[at:end], ""
            text = text[: end if self._include_stop else at]
        else:
            keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._given.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that starts `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
