"""Slack: by how much an interval may grow before the makespan does.

One backward pass over the network (late times of the critical path method). An interval has one answer for
growing and may have another for starting later, since an agent that it spawned in its middle follows the
point of the spawn and not the end.
"""

from dataclasses import dataclass

from teams.dag_network import END, Arc, Network


@dataclass(slots=True)
class _Room:
    """Nanoseconds of room for every interval."""

    start_later: list[int]
    end_later: list[int]
    grow: list[int]


def slack_ns(network: Network) -> list[int]:
    """Nanoseconds by which each interval may grow, by index; 0 on the critical path.

    For a wait it is how much later it may end. What goes on after the end of the run has all the time up to
    that end and no more, since growing further would move it.
    """
    times, num = network.recorded, len(network.intervals)
    run_end_ns = times.end_ns[network.final(times)]
    until_end = [run_end_ns - end for end in times.end_ns]
    room = _Room([run_end_ns - start for start in times.start_ns], until_end, list(until_end))
    for event in reversed(network.order):
        if event >= num:
            _before_wait_end(network, room, event - num)
        else:
            _before_start(network, room, event)
    return [
        room.end_later[i] if network.is_held(i) else min(room.grow[i], room.end_later[i]) for i in range(num)
    ]


def _before_wait_end(network: Network, room: _Room, index: int) -> None:
    times = network.recorded
    end_ns, allowed = times.end_ns[index], room.end_later[index]
    for arc in network.end_arcs[index]:
        _limit(network, room, arc, allowed + end_ns - arc.lag_ns - times.point(arc))
    own_gap = end_ns - network.end_arcs[index][0].lag_ns - times.start_ns[index]
    room.start_later[index] = min(room.start_later[index], allowed + own_gap)


def _before_start(network: Network, room: _Room, index: int) -> None:
    times = network.recorded
    if not network.is_held(index):
        room.start_later[index] = min(room.start_later[index], room.end_later[index])
    start_ns, allowed = times.start_ns[index], room.start_later[index]
    for arc in network.start_arcs[index]:
        _limit(network, room, arc, allowed + start_ns - arc.lag_ns - times.point(arc))


def _limit(network: Network, room: _Room, arc: Arc, allowed: int) -> None:
    """The arc's point may move by `allowed`: bound its source by that."""
    source = arc.source
    if arc.inside_ns == END:
        room.end_later[source] = min(room.end_later[source], allowed)
        return
    room.start_later[source] = min(room.start_later[source], allowed)
    if arc.scale_ns and arc.inside_ns:
        # The point keeps its share of the duration, rounded down: it moves less than the end does.
        growth = ((allowed + 1) * arc.scale_ns - 1) // arc.inside_ns
        room.grow[source] = min(room.grow[source], growth)
