import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from team_doubles import action

from teams.agent import Conversation
from teams.digests import digest, normalise
from teams.tools import ActionError, Edit, Run, Take, Wait, Write, clip, parse_action


def test_an_action_is_read_from_among_prose():
    assert parse_action("I look.\n" + action(do="run", cmd="ls") + "\nThen I go on.") == Run(
        do="run", cmd="ls"
    )
    assert parse_action(action(do="wait", **{"for": "message"})) == Wait(do="wait", **{"for": "message"})
    assert parse_action(action(do="wait", **{"for": ["ada"]})).target == ["ada"]
    assert parse_action(action(do="wait", **{"for": "ada"})).target == ["ada"]
    assert parse_action(action(do="take", **{"from": "ada"})) == Take(do="take", **{"from": "ada"})
    assert isinstance(parse_action(action(do="edit", path="a", old="x", new="")), Edit)


def test_line_breaks_inside_strings_are_taken_as_they_are():
    assert parse_action('```action\n{"do": "run", "cmd": "a\nb"}\n```') == Run(do="run", cmd="a\nb")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("no block at all", "0 action blocks"),
        (action(do="submit") * 2, "2 action blocks"),
        (action(do="submit")[:-3], "0 action blocks"),
        ('```action\n{"do": "submit"} and more\n```', "Extra data"),
        ("```action\n{broken\n```", "not valid JSON"),
        (action(do="fly"), "does not match any of the expected tags"),
        (action(do="run"), "cmd: Field required"),
        (action(do="run", cmd="ls", shell="zsh"), "Extra inputs"),
        (action(do="wait", **{"for": []}), "at least 1 item"),
        ("```action\n[1]\n```", "action"),
    ],
)
def test_what_is_no_action_gets_advice(text, advice):
    with pytest.raises(ActionError, match=advice):
        parse_action(text)


def test_a_file_may_hold_a_fence():
    content = "# Use\n```python\nprint(1)\n```\n```action\n{}\n```\n"
    assert parse_action(f"So:\n{action(do='write', path='a.md', content=content)}\nDone.") == Write(
        do="write", path="a.md", content=content
    )


@given(st.text() | st.text(alphabet='`"\\{}\naction '), st.booleans())
def test_every_content_arrives_as_it_was_written(content, as_ascii):
    fields = {"do": "write", "path": "a.md", "content": content}
    block = f"```action\n{json.dumps(fields, ensure_ascii=as_ascii)}\n```"
    assert parse_action(f"I write.\n{block}\n").content == content


@given(st.text())
def test_no_text_of_a_model_breaks_the_parser(text):
    for candidate in (text, f"```action\n{text}\n```", action(do=text), action(do="run", cmd=text)):
        with contextlib.suppress(ActionError):
            parse_action(candidate)


@pytest.mark.parametrize(
    "body",
    [
        '{"do": ' + "[" * 200_000,
        '{"do": "run", "cmd": "true", "timeout_s": ' + "9" * 5_000 + "}",
        '{"do": "write", "path": "a\\ud800", "content": ""}',
        '{"do": "write", "path": "a", "content": "\\ud800"}',
    ],
)
def test_what_cannot_be_carried_out_gets_advice_too(body):
    with pytest.raises(ActionError):
        parse_action(f"```action\n{body}\n```")


@given(st.text(max_size=5_000), st.integers(120, 2_000))
def test_clipped_text_keeps_head_and_tail_and_its_bound(text, limit):
    short = clip(text, limit)
    assert len(short) <= limit + 20
    assert short[: limit // 2] == text[: limit // 2]
    assert (short == text) == (len(text) <= limit)
    assert short[-40:] == text[-40:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 passed in 0.03s", "3 passed in 12.40s"),
        ("==== 3 passed in 0.03s ====", "=== 3 passed in 100.25s ==="),
        ("<object at 0x7f12ab34>", "<object at 0x55aa0012cd>"),
        ("wrote /tmp/tmpab12/x.txt", "wrote /tmp/tmpzz99/x.txt"),
        ("took 12 ms", "took 1.5 seconds"),
        ("run-3f9a61c04be2d17 began", "run-00aa61c04be2d17 began"),
        ("2025-04-24 02:42:21 ok", "2026-11-29T14:00:00Z ok"),
        ("pid 17", "pid 4000"),
        ("a  \r\nb\n", "a\nb"),
    ],
)
def test_outputs_that_differ_only_by_time_and_place_have_one_digest(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("3 passed in 0.03s", "2 passed in 0.03s"), ("exit 0", "exit 1"), ("a", "a b"), ("x = 12", "x = 13")],
)
def test_outputs_that_differ_otherwise_do_not(one, other):
    assert digest(one) != digest(other)


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    assert normalise(normalise(text)) == normalise(text)


def test_a_conversation_keeps_its_bound_and_its_last_exchange():
    conversation = Conversation("system", "task", limit_chars=2_000)
    for number in range(30):
        conversation.append(f"answer {number}", f"{number} " + "x" * 600)
        messages = conversation.messages()
        assert sum(len(message.content) for message in messages) <= 2_000
        assert messages[0].content == "system"
        assert messages[1].content == "task"
        assert messages[-1].content.startswith(f"{number} xxx")
        roles = [message.role for message in messages[1:]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def test_the_start_of_a_conversation_changes_seldom():
    conversation = Conversation("system", "task", limit_chars=4_000)
    broken = 0
    before = conversation.messages()
    for number in range(40):
        conversation.append(f"answer {number}", "x" * 300)
        after = conversation.messages()
        broken += after[: len(before)] != before
        before = after
    assert broken <= 8


def test_the_system_prompt_is_short():
    from teams import agent

    text = agent._SYSTEM.format(name="lead", lead=agent._LEAD)
    assert len(text) < 480  # about 120 tokens
    assert json.loads(text.split("```action\n")[1].split("\n```")[0])["do"] == "run"
