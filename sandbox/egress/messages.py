"""DNS messages, as far as a resolver for A and AAAA needs them (RFC 1035, 3596). Pure.

What cannot be read raises ValueError and nothing else: both the sandbox and whoever answers upstream may send
anything.
"""

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

A, CNAME, AAAA = 1, 5, 28
NO_ERROR, SERVER_FAILED, NO_SUCH_NAME, NOT_IMPLEMENTED, REFUSED = 0, 2, 3, 4, 5
MAX_UDP_BYTES = 512  # without EDNS, which we do not speak
MAX_MESSAGE_BYTES = 4096
_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_INTERNET = 1
_RESPONSE, _OPCODE, _TRUNCATED, _WANTED, _AVAILABLE = 0x8000, 0x7800, 0x0200, 0x0100, 0x0080
_MAX_RECORDS, _MAX_NAME_BYTES, _MAX_LABEL_BYTES = 64, 255, 63
_POINTER = 0xC0

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Question:
    """`name` is in lower case without the final dot; `raw` is the question as it came, in the asker's own
    case, which an answer repeats."""

    id: int
    name: str
    type: int
    flags: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Addresses of the name asked for, through its aliases, and how long they hold."""

    code: int
    addresses: tuple[Address, ...]
    ttl_s: int


def read_question(message: bytes) -> Question:
    """A query with one question. ValueError for anything else."""
    ident, flags, num_questions, *_ = _header(message)
    if flags & (_RESPONSE | _OPCODE) or num_questions != 1:
        raise ValueError("no plain query")
    name, at = _read_name(message, _HEADER.size)
    if at + 4 > len(message):
        raise ValueError("cut short")
    kind, cls = struct.unpack_from(">HH", message, at)
    if cls != _INTERNET:
        raise ValueError(f"class {cls}")
    return Question(ident, name, kind, flags, message[_HEADER.size : at + 4])


def write_question(ident: int, name: str, kind: int) -> bytes:
    """A query of our own."""
    return _HEADER.pack(ident, _WANTED, 1, 0, 0, 0) + _pack_name(name) + struct.pack(">HH", kind, _INTERNET)


def write_reply(question: Question, code: int, addresses: tuple[Address, ...] = (), ttl_s: int = 0) -> bytes:
    """The answer to a sandbox, with as many addresses as 512 bytes hold."""
    records = b""
    count = 0
    for address in addresses:
        packed = address.packed
        kind = A if len(packed) == 4 else AAAA
        record = struct.pack(">H", 0xC000 | _HEADER.size) + _RECORD.pack(kind, _INTERNET, ttl_s, len(packed))
        if _HEADER.size + len(question.raw) + len(records) + len(record) + len(packed) > MAX_UDP_BYTES:
            break
        records += record + packed
        count += 1
    flags = _RESPONSE | _AVAILABLE | (question.flags & _WANTED) | code
    return _HEADER.pack(question.id, flags, 1, count, 0, 0) + question.raw + records


def read_answer(message: bytes, ident: int, name: str, kind: Literal[1, 28]) -> Answer:
    """The answer to our own query. ValueError when it is none, or cannot be read."""
    answer_id, flags, num_questions, num_records, *_ = _header(message)
    if answer_id != ident or not flags & _RESPONSE or num_questions != 1:
        raise ValueError("not an answer to this query")
    asked, at = _read_name(message, _HEADER.size)
    if asked != name or message[at : at + 4] != struct.pack(">HH", kind, _INTERNET):
        raise ValueError("an answer to another question")
    aliases: dict[str, tuple[str, int]] = {}
    found: dict[str, list[tuple[Address, int]]] = {}
    at += 4
    for _ in range(min(num_records, _MAX_RECORDS)):
        owner, at = _read_name(message, at)
        if at + _RECORD.size > len(message):
            raise ValueError("cut short")
        record_kind, cls, ttl_s, length = _RECORD.unpack_from(message, at)
        at += _RECORD.size
        data = message[at : at + length]
        if len(data) != length:
            raise ValueError("cut short")
        if cls == _INTERNET and record_kind == CNAME:
            aliases[owner] = (_read_name(message, at)[0], ttl_s)
        elif cls == _INTERNET and record_kind == kind and length == (4 if kind == A else 16):
            address = IPv4Address(data) if kind == A else IPv6Address(data)
            found.setdefault(owner, []).append((address, ttl_s))
        at += length
    return _follow(flags & 0xF, name, aliases, found)


def _follow(
    code: int, name: str, aliases: dict[str, tuple[str, int]], found: dict[str, list[tuple[Address, int]]]
) -> Answer:
    """From the name asked for, alias by alias: other records are nobody's business."""
    ttls: list[int] = []
    owner = name
    for _ in range(len(aliases)):
        if owner not in aliases:
            break
        owner, ttl_s = aliases[owner]
        ttls.append(ttl_s)
    addresses = found.get(owner, [])
    ttls += [ttl_s for _, ttl_s in addresses]
    return Answer(code, tuple(address for address, _ in addresses), min(ttls, default=0))


def _header(message: bytes) -> tuple[int, ...]:
    if not _HEADER.size <= len(message) <= MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(message)} bytes")
    return _HEADER.unpack_from(message)


def _read_name(message: bytes, at: int) -> tuple[str, int]:
    """The name and the place after it. Pointers lead backwards only, so reading ends."""
    labels: list[bytes] = []
    after: int | None = None
    least = at
    while True:
        if at >= len(message):
            raise ValueError("cut short")
        length = message[at]
        if length & _POINTER == _POINTER:
            if at + 1 >= len(message):
                raise ValueError("cut short")
            after = at + 2 if after is None else after
            at = (length & ~_POINTER) << 8 | message[at + 1]
            if at >= least:
                raise ValueError("a pointer that does not lead backwards")
            least = at
            continue
        if length & _POINTER or at + 1 + length > len(message):
            raise ValueError("a bad label")
        if length == 0:
            break
        labels.append(message[at + 1 : at + 1 + length])
        if sum(map(len, labels)) + len(labels) > _MAX_NAME_BYTES:
            raise ValueError("a name too long")
        at += 1 + length
    if any(b"." in label or not label.isascii() for label in labels):
        raise ValueError("a name that is no host's")
    return b".".join(labels).decode().lower(), at + 1 if after is None else after


def _pack_name(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.split(".") if label]
    if any(not 0 < len(label) <= _MAX_LABEL_BYTES for label in labels):
        raise ValueError("a bad label")
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
