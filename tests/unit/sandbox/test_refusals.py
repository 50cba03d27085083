"""What was refused, in words and numbers."""

import pytest

from sandbox.refusals import MAX_KINDS, Attempt, Refusals, denials_since


@pytest.mark.parametrize(
    ("attempt", "count", "said"),
    [
        (Attempt("connect", "1.2.3.4", 81, "tcp"), 1, "connecting to 1.2.3.4 port 81 (tcp) was refused once"),
        (Attempt("send", "1.2.3.4", 81, "udp"), 2, "sending to 1.2.3.4 port 81 (udp) was refused 2 times"),
        (Attempt("bind", "1.2.3.4", 81, "tcp"), 1, "binding 1.2.3.4 port 81 (tcp) was refused once"),
        (Attempt("wire", "::7", 81, "tcp"), 3, "sending packets to ::7 port 81 (tcp) was refused 3 times"),
        (Attempt("socket", "", 3, "icmp"), 1, "a raw socket was refused once"),
        (Attempt("name", "a.org", 53, "dns", "is not allowed"), 2, "a.org is not allowed, asked for 2 times"),
        (Attempt("other"), 9, "more was refused, 9 times"),
    ],
)  # fmt: skip
def test_each_kind_has_its_words(attempt: Attempt, count: int, said: str):
    denial = attempt.denial(count)
    assert (denial.limit, denial.count, denial.detail) == ("network", count, said)
    assert (denial.address, denial.protocol) == (attempt.address, attempt.protocol)


def test_only_what_came_since_counts():
    refusals = Refusals()
    first, second = (Attempt("connect", "1.2.3.4", port, "tcp") for port in (80, 81))
    refusals.add(first)
    before = refusals.counts()
    assert denials_since(before, refusals.counts()) == ()
    refusals.add(first)
    refusals.add(second)
    assert [(each.port, each.count) for each in denials_since(before, refusals.counts())] == [
        (80, 1),
        (81, 1),
    ]


def test_kinds_are_bounded_and_none_is_lost():
    refusals = Refusals()
    for port in range(MAX_KINDS + 50):
        refusals.add(Attempt("connect", "1.2.3.4", port, "tcp"))
    counts = refusals.counts()
    assert len(counts) == MAX_KINDS + 1
    assert counts[Attempt("other")] == 50
