"""Control tokens of a prompt are the template's: no message writes one; others stay as they were."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import CONTROL, TEMPLATE, byte_ids

from actors.token_client import RequestFailed
from engine.chat.prompt import encode_messages
from engine.chat.template import ChatTemplate
from engine.chat.template_form import TemplateForm
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest
from gateway.app import create_app
from gateway.chat_request import parse_chat, prepare_chat
from gateway.config import GatewayConfig
from gateway.generation import Asked, Generation
from gateway.service import ChatService
from protocol.clock import SystemClock
from protocol.wire import Failed

PLAIN = ChatTemplate(TEMPLATE, {})
pieces = st.sampled_from([*CONTROL, "<", "<|", "<|im_", "|>", "im_end|>", "a", " the", "\n", "<<|im_end|>"])
texts = st.lists(pieces, max_size=5).map("".join)


def controls(ids: list[int]) -> list[int]:
    return [token for token in ids if token < len(CONTROL)]


@settings(deadline=None)
@given(contents=st.lists(st.text().filter(lambda text: "<|" not in text), min_size=1, max_size=3))
def test_an_ordinary_prompt_has_the_ids_of_its_rendered_text(
    tiny_tokenizer: ChatTokenizer, contents: list[str]
) -> None:
    messages = [{"role": "user", "content": text} for text in contents]
    expected = tiny_tokenizer.encode(PLAIN.render(messages))
    assert encode_messages(messages, PLAIN, tiny_tokenizer) == expected


@settings(deadline=None)
@given(role=texts, contents=st.lists(texts, min_size=1, max_size=3))
def test_no_message_makes_a_control_token(
    tiny_tokenizer: ChatTokenizer, role: str, contents: list[str]
) -> None:
    messages = [{"role": role, "content": text} for text in contents]
    ids = encode_messages(messages, PLAIN, tiny_tokenizer)
    start, end = CONTROL.index("<|im_start|>"), CONTROL.index("<|im_end|>")
    assert controls(ids) == [start, end] * len(contents) + [start]
    whole = "".join(f"{role}\n{text}\n" for text in contents)
    assert tiny_tokenizer.decode(ids) == whole + "assistant\n"


def test_what_a_message_begins_the_template_does_not_complete(tiny_tokenizer: ChatTokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}end|>{% endfor %}", {})
    for role, content in (("<|im_", "end|>"), ("x", "<|im_"), ("<", "|im_")):
        ids = encode_messages([{"role": role, "content": content}], template, tiny_tokenizer)
        assert controls(ids) == []
        assert tiny_tokenizer.decode(ids) == f"{role}{content}end|>"


def form_of(template: object, tokenizer: ChatTokenizer) -> TemplateForm:
    return TemplateForm(cast(ChatTemplate, template), tokenizer)


def prepared(body: str, tokenizer: ChatTokenizer) -> Asked:
    return prepare_chat(parse_chat(body.encode()), form_of(PLAIN, tokenizer), tokenizer, 512, GatewayConfig())


def test_forced_text_is_text(tiny_tokenizer: ChatTokenizer) -> None:
    body = '{"messages": [{"role": "user", "content": "a"}], "dockyard": {"forced_text": "<|im_end|>"}}'
    assert prepared(body, tiny_tokenizer).generations[0].choices[0].forced_ids == tuple(
        byte_ids(b"<|im_end|>")
    )


class Untouched:
    """A template that must not be reached."""

    def render(self, messages: object) -> str:
        raise AssertionError("rendered")


@pytest.mark.parametrize(
    ("fields", "parameter", "told"),
    [
        (
            {"messages": [{"role": "user"}] * 513},
            "messages",
            "However, there are 513 messages",
        ),
        ({"messages": []}, "messages", "empty"),
        ({"stop": "x" * 513}, "stop", "a string of 513 characters; at most 512"),
        ({"stop": ["x"] * 17}, "stop", "17 strings"),
        (
            {"messages": [{"role": "user", "content": [{"type": "y" * 9_999}]}]},
            "messages",
            "content part 'yyy",
        ),
        ({"messages": [{"role": "user", "content": [{"type": ""}]}]}, "messages", "content part ''"),
        ({"logit_bias": {"": 1}}, "logit_bias", "'', which is no token id"),
    ],
)
def test_what_has_no_bound_of_its_own_is_refused_before_it_is_rendered(
    tiny_tokenizer: ChatTokenizer, fields: dict[str, Any], parameter: str, told: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    with pytest.raises(InvalidRequest, match=told) as refused:
        prepare_chat(
            parse_chat(body), form_of(Untouched(), tiny_tokenizer), tiny_tokenizer, 512, GatewayConfig()
        )
    assert refused.value.parameter == parameter
    assert len(str(refused.value)) < 600


def test_text_that_cannot_fit_is_refused_before_it_is_rendered(tiny_tokenizer: ChatTokenizer) -> None:
    body = parse_chat(b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 10_000))
    with pytest.raises(InvalidRequest, match=r"is 512 tokens\. However, messages has 10000 characters"):
        prepare_chat(body, form_of(Untouched(), tiny_tokenizer), tiny_tokenizer, 512, GatewayConfig())
    forced = '{"messages": [{"role": "user", "content": "a"}], "dockyard": {"forced_text": "%s"}}'
    with pytest.raises(InvalidRequest, match="forced_text has 10000 characters"):
        prepared(forced % ("x" * 10_000), tiny_tokenizer)


async def unused(*_: object) -> Any: ...


def test_preparing_leaves_the_event_loop_free(tiny_tokenizer: ChatTokenizer) -> None:
    """The template waits for what only the loop can do."""
    released = threading.Event()

    class Waiting:
        def render(self, messages: object) -> str:
            assert released.wait(30), "the loop did not run"
            raise InvalidRequest("done", parameter="messages")

    model = SimpleNamespace(
        name="tiny", form=form_of(Waiting(), tiny_tokenizer), tokenizer=tiny_tokenizer, max_positions=512
    )
    service = SimpleNamespace(
        model=model, config=GatewayConfig(), client=SimpleNamespace(lost=""), ending=asyncio.Event()
    )

    async def status() -> dict[str, Any]:
        released.set()
        return {}

    async def set_pace(role: str, factor: float) -> None: ...

    async def both() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(cast(ChatService, service), status, unused, set_pace))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            body = {"messages": [{"role": "user", "content": "a"}]}
            asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await asyncio.sleep(0)
            await http.get("/dockyard/status")
            return await asked

    assert asyncio.run(both()).status_code == 400


def test_a_request_has_arrived_before_it_is_rendered(tiny_tokenizer: ChatTokenizer) -> None:
    rendered: list[int] = []
    taken: list[Generation] = []

    class Timed:
        def render(self, messages: object) -> str:
            rendered.append(SystemClock().now_ns())
            return "a"

    async def complete(generations: tuple[Generation, ...]) -> list[Any]:
        taken.extend(generations)
        raise RequestFailed(Failed("r", "lost", "as the test wants"))

    model = SimpleNamespace(
        name="tiny", form=form_of(Timed(), tiny_tokenizer), tokenizer=tiny_tokenizer, max_positions=512
    )
    service = SimpleNamespace(model=model, config=GatewayConfig(), complete=complete, ending=asyncio.Event())

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(cast(ChatService, service), unused, unused, unused))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            body = {"messages": [{"role": "user", "content": "a"}]}
            return await http.post("/v1/chat/completions", json=body)

    before = SystemClock().now_ns()
    assert asyncio.run(ask()).status_code == 503
    assert before <= taken[0].arrived_ns <= rendered[0]
