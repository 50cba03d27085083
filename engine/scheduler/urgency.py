"""Who goes first: those left unserved too long, then by priority, then by when a call becomes critical."""

from engine.request import Sequence

Urgency = tuple[bool, int, int, int, str, int]


def urgency(sequence: Sequence, now_ns: int, starvation_ns: int) -> Urgency:
    """Less is more urgent.

    A call with slack may start that much later without holding anyone up, so it counts as if it had come that
    much later. One that got no row for `starvation_ns` goes before all others, whatever its priority: nobody
    waits for ever. It stays first until it has its next token, as rows alone bring nobody on: whoever comes
    before it then takes its blocks, and all of it is computed again.
    """
    arrived = sequence.stages.arrived_ns
    due_ns = arrived + int(sequence.request.slack_ms * 1e6)
    starving = is_starving(sequence, now_ns, starvation_ns)
    priority = 0 if starving else sequence.request.priority
    return (
        not starving,
        priority,
        arrived if starving else due_ns,
        arrived,
        sequence.request.id,
        sequence.choice,
    )


def is_starving(sequence: Sequence, now_ns: int, starvation_ns: int) -> bool:
    """Of one that has run, the wait counts from its last row; too long, it lasts until the next token."""
    if sequence.owed_at == len(sequence.token_ids):
        return True
    return now_ns > starves_at(sequence, starvation_ns)


def starves_at(sequence: Sequence, starvation_ns: int) -> int:
    """Behind this time it has waited too long, unless it gets a row before."""
    return max(sequence.served_ns, sequence.stages.arrived_ns) + starvation_ns


def outranks(one: Sequence, other: Sequence, now_ns: int, starvation_ns: int) -> bool:
    """Whether `one` may take the blocks of `other` while that runs: only by its priority, and from nobody
    who was left waiting too long already."""
    return one.request.priority < other.request.priority and not is_starving(other, now_ns, starvation_ns)
