"""Where the reply says that a request's time went."""

import itertools

from gateway.chat_reply import ChoiceResult, ReplyHead, extension, timeline
from protocol.wire import Tokens


def tokens(adopted_ns: int = 50) -> Tokens:
    return Tokens("gw/1", 0, (1,), "stop", 20, 30, 40, adopted_ns, 90, 0)


def test_stages_come_in_order():
    spans = [(span["kind"], span["start_ns"], span["end_ns"]) for span in timeline(tokens())]
    assert spans == [
        ("model.queue", 20, 30),
        ("model.prefill", 30, 40),
        ("model.transfer", 40, 50),
        ("model.decode", 50, 90),
    ]


def test_stages_follow_each_other_without_gaps():
    for adopted_ns in (0, 50):
        spans = timeline(tokens(adopted_ns))
        assert all(before["end_ns"] == after["start_ns"] for before, after in itertools.pairwise(spans))
        assert (spans[0]["start_ns"], spans[-1]["end_ns"]) == (20, 90)


def test_the_reply_carries_the_timeline_of_its_slowest_choice():
    late = Tokens("gw/2", 0, (1,), "stop", 25, 30, 40, 50, 95, 0)
    results = [ChoiceResult(0, "a", "stop", 1, tokens()), ChoiceResult(1, "b", "stop", 1, late)]
    found = extension(ReplyHead("req-1", 0, "tiny"), results)
    assert found["request_id"] == "req-1"
    assert found["timeline"][0]["start_ns"] == 25
