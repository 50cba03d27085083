"""Making arcs: from the end of an interval, from a point inside of it, and along an agent's own program."""

import heapq
from collections.abc import Sequence

from teams.dag_network import END, PROGRAM_ORDER, Arc, Times


def end_arc(source: int, now_ns: int, times: Times, edge: int) -> Arc:
    """An arc from the end of `source` to an event at `now_ns`, with its lag if it were the only one."""
    gap_ns = now_ns - times.end_ns[source]
    return Arc(source, edge, END, 0, -gap_ns, 0) if gap_ns < 0 else Arc(source, edge, END, 0, 0, gap_ns)


def inside_arc(source: int, now_ns: int, times: Times, edge: int) -> Arc:
    """An arc from the point inside of `source` at which the event at `now_ns` took place."""
    start, end = times.start_ns[source], times.end_ns[source]
    if end == start:
        return end_arc(source, now_ns, times, edge)
    inside_ns = min(max(0, now_ns - start), end - start)
    return Arc(source, edge, inside_ns, end - start, 0, now_ns - start - inside_ns)


def with_lag(
    arcs: Sequence[Arc], now_ns: int, times: Times, not_before_ns: int | None = None
) -> Sequence[Arc]:
    """The same arcs with the delay from the last of their points (and `not_before_ns`) to `now_ns`."""
    if not arcs:
        return ()
    last_ns = max(times.point(arc) for arc in arcs)
    if not_before_ns is not None:
        last_ns = max(last_ns, not_before_ns)
    lag_ns = now_ns - last_ns
    return tuple([arc if arc.lag_ns == lag_ns else arc._replace(lag_ns=lag_ns) for arc in arcs])


def without_scale(arcs: Sequence[Arc], end_arcs: Sequence[Sequence[Arc]]) -> Sequence[Arc]:
    """The same arcs; points inside of held waits keep their distance from the wait's start.

    A held wait has no length of its own. Otherwise its end would be needed for what, in turn, may end it.
    """
    return tuple([arc._replace(scale_ns=0) if end_arcs[arc.source] else arc for arc in arcs])


def add_program_order(
    arcs: list[Sequence[Arc]], indices: Sequence[int], times: Times, tolerance_ns: int
) -> None:
    """Add to `arcs` those between one agent's intervals; `indices` are sorted by start.

    Intervals that overlap by no more than the tolerance follow each other. Others ran at the same time, and
    what comes after them waits for all of them.
    """
    start, end = times.start_ns, times.end_ns
    running: list[tuple[int, int]] = []  # heap of (end, position)
    ended: list[int] = []  # positions that nothing is known to have followed
    for position, index in enumerate(indices):
        now = start[index]
        while running and running[0][0] <= now + tolerance_ns:
            ended.append(heapq.heappop(running)[1])
        if len(ended) > 1:
            latest = max(ended)
            horizon = start[indices[latest]] + tolerance_ns
            ended = [p for p in ended if p == latest or end[indices[p]] > horizon]
        if len(ended) == 1:
            arcs[index] = (end_arc(indices[ended[0]], now, times, PROGRAM_ORDER),)
        elif ended:
            found = [end_arc(indices[p], now, times, PROGRAM_ORDER) for p in ended]
            arcs[index] = with_lag(found, now, times)
        elif position:
            arcs[index] = (inside_arc(indices[position - 1], now, times, PROGRAM_ORDER),)
        heapq.heappush(running, (end[index], position))
