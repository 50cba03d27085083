"""Digests of tool output that are equal when two runs did the same thing.

What differs between two right runs is replaced before hashing, and nothing else:

- durations (`0.03s`, `12 ms`, `1.5 seconds`, `0:00:02`) become `<time>`;
- dates with a time of day become `<date>`;
- object addresses (`0x7f…`) become `<address>`;
- paths under `/tmp` become `<tmp>`;
- Dockyard's ids (`run-…`, `sbx-…`) become `<id>`, and numbers after `pid` become `<pid>`;
- runs of three or more `=`, `-` or `_` (rulers whose length follows a duration's) shrink to three;
- line ends become `\\n`, blanks at line ends go.
"""

import hashlib
import re

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\r\n?"), "\n"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "<date>"),
    (re.compile(r"\b\d+:\d\d:\d\d(\.\d+)?\b"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? ?(s|ms|us|µs|ns|seconds?|minutes?)\b"), "<time>"),
    (re.compile(r"\b0x[0-9a-fA-F]{4,}\b"), "<address>"),
    (re.compile(r"(?<![\w/])/tmp/[^\s'\":,)\]]+"), "<tmp>"),
    (re.compile(r"\b(run|req|sbx|trial|ivl)-[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(r"\b(pid[ =:]+)\d+", re.IGNORECASE), r"\1<pid>"),
    (re.compile(r"={3,}"), "==="),
    (re.compile(r"-{3,}"), "---"),
    (re.compile(r"_{3,}"), "___"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


def normalise(output: str) -> str:
    """`output` without what may differ between two runs that did the same."""
    for pattern, replacement in _RULES:
        output = pattern.sub(replacement, output)
    return output.strip("\n")


def digest(output: str) -> str:
    """The first 16 hex digits of the SHA-256 of the normalised output."""
    return hashlib.sha256(normalise(output).encode("utf-8", errors="surrogateescape")).hexdigest()[:16]
