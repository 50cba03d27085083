"""Where the reply says that a request's time went."""

import itertools

from gateway.chat_reply import ChoiceResult, ReplyHead, extension, timeline
from protocol.stages import StageNs
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


def test_a_model_with_stages_tells_its_queue_and_each_of_them() -> None:
    """Of the choice that ended last, in milliseconds; a model without stages tells none."""
    spent = StageNs(encoder=2_500_000, bridge=500_000, decoder=4_000_000)
    tokens = Tokens("r", 0, (1,), "stop", 1_000_000, 3_000_000, 4, 5, 6, 0, stages=spent)
    found = extension(ReplyHead("req-1", 0, "m"), [ChoiceResult(0, "a", "stop", 1, tokens)])
    assert found["stages_ms"] == {"queue": 2.0, "encoder": 2.5, "bridge": 0.5, "decoder": 4.0}
    plain = Tokens("r", 0, (1,), "stop", 1, 2, 3, 4, 5, 0)
    assert "stages_ms" not in extension(ReplyHead("req-1", 0, "m"), [ChoiceResult(0, "a", "stop", 1, plain)])
