"""Bodies that are no request: a 400 that names what is wrong, whatever they are."""

import pytest

from engine.errors import InvalidRequest
from gateway.chat_request import parse_chat


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (b'{"messages": [], "x": ' + b"[" * 1_000_000, "body"),
        (b"{", "body"),
        (b"\xff", "body"),
        (b'{"messages": "hello"}', "messages"),
        (b'{"messages": [{"content": "no role"}]}', "messages[0]"),
        (b'{"messages": [{"role": "", "content": "a"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "%s", "content": "a"}]}' % (b"x" * 8_000_000), "messages[0].role"),
    ],
)
def test_the_field_is_named(body: bytes, parameter: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(body)
    assert refused.value.parameter == parameter
    assert len(str(refused.value)) < 600
