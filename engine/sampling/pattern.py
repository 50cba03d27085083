"""What of a regular expression our grammars cannot say: refused by name.

Of escapes that it does not know, and of anchors in the middle, xgrammar 0.2.9 says a word on stderr and takes
the letter, or nothing. A schema's `pattern` is of the value, and xgrammar writes it into the string as it is:
what a string of JSON has to escape may be left out of a class there, and nowhere else.
"""

import re
from collections.abc import Iterator

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c[A-Za-z]|.)"
_PIECE = re.compile(rf"{_ESCAPE}|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_MEMBER = re.compile(rf"(?P<low>{_ESCAPE}|.)(?:-(?P<high>{_ESCAPE}|.))?", re.DOTALL)
_KNOWN_LETTERS = frozenset("dDwWsSnrtfvxuc0ae")
_TOLD_BY_LIBRARY = frozenset("bBpPk123456789")  # refused there, by what they are
_CODES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
_ESCAPED_IN_JSON = frozenset([*range(0x20), ord('"'), ord("\\")])


def faults_of_pattern(pattern: str, *, in_json: bool = False) -> Iterator[str]:
    """What is wrong with it, as the end of a sentence that begins with its place.

    `in_json`: it is of a value whose text stands in a string of JSON.
    """
    pieces = [match.group() for match in _PIECE.finditer(pattern)]
    depth = 0
    for index, piece in enumerate(pieces):
        depth += (piece == "(") - (piece == ")")
        before, after = pieces[index - 1 : index], pieces[index + 1 : index + 2]
        if piece in "^$":
            edge = before if piece == "^" else after
            if depth or edge not in ([], ["|"]):
                yield f"has {piece!r} in its middle, which is not supported: the whole text is matched"
        elif piece.startswith("["):
            yield from _faults_of_class(piece, in_json=in_json)
        else:
            yield from _faults_of_escape(piece, "".join(after))
            if in_json and _code(piece) in _ESCAPED_IN_JSON:
                yield f"has {piece!r}, which JSON has to escape; that is not supported"


def _faults_of_class(piece: str, *, in_json: bool) -> Iterator[str]:
    if re.search(r"\[[:.=]", piece[1:]):
        yield f"has {piece!r}, a class by name, which is not supported"
    for escape in re.findall(_ESCAPE, piece):
        if escape != "\\b":  # a backspace here
            yield from _faults_of_escape(escape, "")
    if in_json and not any(_holds(piece, code) for code in _candidates(piece)):
        yield f"has {piece!r}, of which JSON has to escape every character; that is not supported"


def _faults_of_escape(piece: str, after: str) -> Iterator[str]:
    if len(piece) < 2 or not piece[1].isalnum() or not piece.isascii():
        return
    if piece[1] not in _KNOWN_LETTERS | _TOLD_BY_LIBRARY or (piece == "\\0" and after.isdigit()):
        yield f"has {piece!r}, an escape that is not supported"


def _candidates(piece: str) -> Iterator[int]:
    """Characters that need no escape, of which each class that has any has one: among the usual ones, those
    that it names and those next to them."""
    named = [code for member in _members(piece) for code in member if code is not None]
    near = [code + by for code in named for by in (-1, 0, 1)]
    for code in (*range(0x20, 0x180), *near, 0x10FFFF):
        if 0 <= code <= 0x10FFFF and code not in _ESCAPED_IN_JSON:
            yield code


def _holds(piece: str, code: int) -> bool:
    inside = any(
        low is not None and high is not None and low <= code <= high for low, high in _members(piece)
    ) or any(re.fullmatch(name, chr(code), re.ASCII) for name in re.findall(r"\\[dDwWsS]", piece))
    return inside != piece.startswith("[^")


def _members(piece: str) -> Iterator[tuple[int | None, int | None]]:
    """The first and the last code of each; none of a class within the class."""
    for member in _MEMBER.finditer(piece[2:-1] if piece.startswith("[^") else piece[1:-1]):
        low = _code(member["low"])
        yield low, _code(member["high"]) if member["high"] is not None else low


def _code(piece: str) -> int | None:
    if not piece.startswith("\\") or len(piece) < 2:
        return ord(piece)
    name, rest = piece[1], piece[2:]
    if name in "dDwWsS":
        return None
    if rest:
        return ord(rest) & 31 if name == "c" else int(rest.strip("{}"), 16)
    return _CODES.get(name, ord(name))
