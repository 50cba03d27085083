"""Templates come from files of unknown origin: what they may do, and how their refusals are told."""

import pytest

from engine.chat.template import ChatTemplate
from engine.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def test_it_sees_messages_special_tokens_and_whether_to_prompt() -> None:
    template = ChatTemplate("{{ bos }}{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
                            "{% if add_generation_prompt %}go{% endif %}", {"bos": "<s>"})  # fmt: skip
    assert template.render([USER]) == "<s>user:hi;go"
    assert template.render([USER], add_generation_prompt=False) == "<s>user:hi;"


def test_blocks_leave_no_blank_lines() -> None:
    assert (
        ChatTemplate("{% for m in messages %}\n  {% if true %}\nx\n{% endif %}\n{% endfor %}", {}).render(
            [USER]
        )
        == "x\n"
    )


def test_a_refusal_names_its_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        template.render([USER])
    assert refused.value.parameter == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_it_cannot_leave_its_sandbox(source: str) -> None:
    messages = [USER]
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    "source", ["{{ 1 // 0 }}", "{{ messages[0]['content'] + 1 }}", "{{ range(10) | list | first + 'x' }}"]
)
def test_its_own_mistakes_are_refusals_too(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        ChatTemplate(source, {}).render([USER])
