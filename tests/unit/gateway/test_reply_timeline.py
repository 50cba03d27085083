"""Where the reply says that a request's time went."""

import itertools

from gateway.chat_reply import ChoiceResult, ReplyHead, extension, timeline
from protocol.wire import Tokens


def tokens(adopted_ns: int = 50) -> Tokens:
    return Tokens("gw/1", 0, (1,), "stop", 20, 30, 40, adopted_ns, 90, 0)


def test_waiting_begins_when_the_gateway_submits():
    spans = [(span["kind"], span["start_ns"], span["end_ns"]) for span in timeline(tokens(), submitted_ns=5)]
    assert spans == [
        ("model.queue", 5, 30),
        ("model.prefill", 30, 40),
        ("model.transfer", 40, 50),
        ("model.decode", 50, 90),
    ]


def test_without_a_submission_waiting_begins_at_the_engine():
    assert timeline(tokens())[0] == {"kind": "model.queue", "start_ns": 20, "end_ns": 30}


def test_stages_follow_each_other_without_gaps():
    for adopted_ns in (0, 50):
        spans = timeline(tokens(adopted_ns), submitted_ns=5)
        assert all(before["end_ns"] == after["start_ns"] for before, after in itertools.pairwise(spans))
        assert (spans[0]["start_ns"], spans[-1]["end_ns"]) == (5, 90)


def test_the_reply_carries_the_submission_of_its_slowest_choice():
    results = [ChoiceResult(0, "a", "stop", 1, tokens(), submitted_ns=7)]
    found = extension(ReplyHead("req-1", 0, "tiny"), results)
    assert found["request_id"] == "req-1"
    assert found["timeline"][0]["start_ns"] == 7
