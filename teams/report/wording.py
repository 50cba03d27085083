"""How values read: figures in few digits, and text of unknown origin made harmless for any screen."""

from protocol.visible_text import visible

MAX_CHARS = 20_000
"""Longest text that a report shows of one turn; a model that prints for ever must not fill the page."""


def one_line(text: str, width: int) -> str:
    """The text on one line of at most `width` characters."""
    line = " ".join(visible(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def bounded(text: str) -> str:
    """The text, or its first MAX_CHARS with a note of what is missing."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}\n… {len(text) - MAX_CHARS:,} more characters"


def seconds(value: float) -> str:
    """A length of time in three digits: `12.3 s`, `45 ms`, `0.2 ms`."""
    if abs(value) >= 100:
        return f"{value:.0f} s"
    if abs(value) >= 10:
        return f"{value:.1f} s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if value == 0:
        return "0 s"
    return f"{value * 1000:.0f} ms" if abs(value) >= 0.01 else f"{value * 1000:.1f} ms"


def percent(share: float) -> str:
    """A share of 1 in tenths of a percent."""
    return f"{share * 100:.1f}%"


def rate(value: float | None) -> str:
    """A score, or a dash where there is none."""
    return "–" if value is None else percent(value)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
