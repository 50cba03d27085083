import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidInput
from teams.mailbox import Mailbox, MailboxFullError

AGENTS = ("lead", "ada", "bo")


def opened(**settings):
    mailbox = Mailbox(**settings)
    for agent in AGENTS:
        mailbox.open_box(agent)
    return mailbox


@given(
    st.lists(st.tuples(st.sampled_from(AGENTS), st.sampled_from(AGENTS), st.text(max_size=20)), max_size=40)
)
def test_each_box_keeps_the_order_of_the_team(sends):
    mailbox = opened(capacity=100)
    for sender, receiver, text in sends:
        mailbox.send(sender, receiver, text, "ivl-1")
    for agent in AGENTS:
        taken = mailbox.take(agent)
        assert [(m.sender, m.text) for m in taken] == [(s, t) for s, r, t in sends if r == agent]
        assert [m.number for m in taken] == [n for n, (_, r, _) in enumerate(sends, 1) if r == agent]
        assert mailbox.pending(agent) == 0


def test_a_full_box_refuses_and_takes_again_once_it_is_emptied():
    mailbox = opened(capacity=2)
    mailbox.send("ada", "lead", "one", "ivl-1")
    mailbox.send("ada", "lead", "two", "ivl-1")
    with pytest.raises(MailboxFullError, match="lead holds 2"):
        mailbox.send("ada", "lead", "three", "ivl-1")
    assert len(mailbox.take("lead")) == 2
    assert mailbox.send("ada", "lead", "three", "ivl-1").number == 3


def test_a_stranger_and_a_long_text_are_refused():
    mailbox = opened(max_chars=10)
    with pytest.raises(InvalidInput, match="nobody is called 'zoe'"):
        mailbox.send("ada", "zoe", "hi", "ivl-1")
    with pytest.raises(InvalidInput, match="11 characters"):
        mailbox.send("ada", "lead", "x" * 11, "ivl-1")


def test_a_journal_tells_what_was_sent_and_taken_and_is_never_mixed_with_another(tmp_path):
    journal = tmp_path / "mail.jsonl"
    mailbox = opened(journal=journal)
    mailbox.send("ada", "lead", "one é", "ivl-1")
    mailbox.take("lead")
    mailbox.close()
    sent, taken = map(json.loads, journal.read_text().splitlines())
    assert (sent["sent"]["text"], taken) == ("one é", {"taken": "lead", "up_to": 1})
    with pytest.raises(InvalidInput, match="exists already"):
        opened(journal=journal)
