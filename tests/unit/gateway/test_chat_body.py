"""Bodies that are no request: a 400 that names what is wrong, whatever they are."""

from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequest
from gateway.chat_body import check_chat
from gateway.chat_request import parse_chat
from gateway.completion_body import check_completion, parse_completion


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


COMMON: dict[str, Any] = {
    "guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": "x",
    "truncate_prompt_tokens": 5, "use_beam_search": True, "skip_special_tokens": False,
    "logits_processors": ["x"], "allowed_token_ids": [1], "bad_words": ["a"],
}  # fmt: skip
OF_CHATS: dict[str, Any] = {
    "chat_template": "{{ x }}", "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"a": "b"}],
    "add_generation_prompt": False, "add_special_tokens": True, "thinking": {"type": "disabled"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*COMMON.items(), *OF_CHATS.items()])
def test_what_would_change_a_chat_and_is_not_done_is_refused_by_name(name: str, value: object) -> None:
    body = parse_chat(msgspec.json.encode({"messages": [], name: value}))
    with pytest.raises(InvalidRequest, match=f"{name} is not supported") as refused:
        check_chat(body)
    assert refused.value.parameter == name


@pytest.mark.parametrize(("name", "value"), [*COMMON.items(), ("add_special_tokens", False)])
def test_what_would_change_a_completion_and_is_not_done_is_refused_by_name(name: str, value: object) -> None:
    body = parse_completion(msgspec.json.encode({"prompt": "a", name: value}))
    with pytest.raises(InvalidRequest, match=f"{name} is not supported") as refused:
        check_completion(body)
    assert refused.value.parameter == name


def test_asking_for_what_is_done_unasked_is_taken() -> None:
    check_chat(parse_chat(msgspec.json.encode({"messages": [], "thinking": {"type": "enabled"}})))


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_an_unknown_field_of_ours_is_refused_by_name(parse: Any) -> None:
    rest: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "unknown": 1}
    parse(msgspec.json.encode({**rest, "dockyard": {"slack_ms": 1}}))
    with pytest.raises(InvalidRequest, match=r"^dockyard\.slak is unknown") as refused:
        parse(msgspec.json.encode({**rest, "dockyard": {"slak": 1}}))
    assert refused.value.parameter == "dockyard"
    assert "slack_ms" in refused.value.hint
