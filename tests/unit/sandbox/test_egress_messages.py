"""DNS messages: what is written can be read, and what comes from strangers does no harm."""

import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.egress import messages
from sandbox.egress.messages import AAAA, CNAME, A, read_answer, read_question, write_question, write_reply

labels = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=63)
names = st.lists(labels, min_size=1, max_size=4).map(".".join).filter(lambda name: len(name) < 250)


def packed_name(name: str) -> bytes:
    return b"".join(bytes([len(each)]) + each.encode() for each in name.split(".")) + b"\0"


def a_record(owner: str, kind: int, data: bytes, ttl_s: int = 60) -> bytes:
    return packed_name(owner) + struct.pack(">HHIH", kind, 1, ttl_s, len(data)) + data


def an_answer(name: str, records: list[bytes], kind: int = A, ident: int = 7, code: int = 0) -> bytes:
    header = struct.pack(">HHHHHH", ident, 0x8180 | code, 1, len(records), 0, 0)
    return header + packed_name(name) + struct.pack(">HH", kind, 1) + b"".join(records)


@given(st.integers(0, 65535), names, st.sampled_from([A, AAAA, 16, 65]))
def test_questions_are_read_as_written(ident: int, name: str, kind: int):
    question = read_question(write_question(ident, name, kind))
    assert (question.id, question.name, question.type) == (ident, name, kind)


@given(names, st.lists(st.ip_addresses(v=4) | st.ip_addresses(v=6), max_size=40), st.integers(0, 3600))
def test_replies_hold_what_fits(name: str, addresses: list[IPv4Address | IPv6Address], ttl_s: int):
    reply = write_reply(read_question(write_question(3, name, A)), 0, tuple(addresses), ttl_s)
    assert len(reply) <= messages.MAX_UDP_BYTES
    answer = read_answer(reply, 3, name, A)
    in_it = [each for each in addresses if each.version == 4]
    assert list(answer.addresses) == in_it[: len(answer.addresses)]
    if in_it and addresses[0].version == 4:
        assert answer.ttl_s == ttl_s


@given(st.binary(max_size=200))
def test_anything_else_is_a_value_error(message: bytes):
    for read in (read_question, lambda text: read_answer(text, 7, "example.org", A)):
        with suppress(ValueError):
            read(message)


@given(st.data())
def test_a_changed_answer_is_an_answer_or_a_value_error(data: st.DataObject):
    records = [a_record("example.org", CNAME, packed_name("b.org")), a_record("b.org", A, bytes(4))]
    message = bytearray(an_answer("example.org", records))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        read_answer(bytes(message), 7, "example.org", A)


def test_names_compare_without_case_and_replies_repeat_the_askers():
    question = read_question(write_question(1, "ExAmple.ORG", A))
    assert question.name == "example.org"
    assert b"ExAmple" in write_reply(question, 0)


def test_aliases_are_followed_and_others_records_left():
    records = [
        a_record("www.example.org", CNAME, packed_name("cdn.net"), 30),
        a_record("cdn.net", A, bytes([203, 0, 113, 7]), 300),
        a_record("other.net", A, bytes([10, 0, 0, 1])),
    ]
    answer = read_answer(an_answer("www.example.org", records), 7, "www.example.org", A)
    assert answer.addresses == (IPv4Address("203.0.113.7"),)
    assert answer.ttl_s == 30


def test_aliases_in_a_circle_lead_nowhere():
    records = [
        a_record("a.org", CNAME, packed_name("b.org")),
        a_record("b.org", CNAME, packed_name("a.org")),
    ]
    assert read_answer(an_answer("a.org", records), 7, "a.org", A).addresses == ()


@pytest.mark.parametrize(
    "message",
    [
        an_answer("example.org", [], ident=8),
        an_answer("example.com", []),
        an_answer("example.org", [], kind=AAAA),
        write_question(7, "example.org", A),
    ],
    ids=["id", "name", "type", "query"],
)
def test_only_the_answer_to_the_question_counts(message: bytes):
    with pytest.raises(ValueError, match=r"not an answer|another question"):
        read_answer(message, 7, "example.org", A)


def test_pointers_that_do_not_lead_back_are_refused():
    header = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="backwards"):
        read_question(header + b"\xc0\x0c" + struct.pack(">HH", A, 1))
