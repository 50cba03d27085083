"""Text of unknown origin, harmless for any screen."""

import re

# C0 and C1 controls but newline and tab, marks that turn the direction of text, and halves of surrogates.
_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with every character that could steer a terminal or a page replaced by a visible mark."""
    return _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
