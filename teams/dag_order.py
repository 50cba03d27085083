"""An order of a network's events in which every arc points forward, and the cycles that prevent one."""

from collections.abc import Sequence

from teams.dag_network import END, Arc, Network


def topological_order(start_arcs: Sequence[Sequence[Arc]], end_arcs: Sequence[Sequence[Arc]]) -> list[int]:
    """Events (see `Network.order`), each after all that it waits for; those on or behind a cycle are missing.

    Followers are kept as chains of integers: a list object for each event would cost more than the sorting.
    """
    num = len(start_arcs)
    head, follower, following = [-1] * (2 * num), list[int](), list[int]()

    def follows(event: int, before: int) -> None:
        following.append(head[before])
        head[before] = len(follower)
        follower.append(event)

    missing = [len(arcs) for arcs in start_arcs] + [0] * num
    for index in range(num):
        for arc in start_arcs[index]:
            follows(index, _event(arc, end_arcs, num))
        if end_arcs[index]:
            missing[num + index] = 1 + len(end_arcs[index])
            follows(num + index, index)
            for arc in end_arcs[index]:
                follows(num + index, _event(arc, end_arcs, num))
    order = [index for index in range(num) if missing[index] == 0]
    for event in order:
        link = head[event]
        while link >= 0:
            after = follower[link]
            missing[after] -= 1
            if missing[after] == 0:
                order.append(after)
            link = following[link]
    return order


def on_cycles(network: Network) -> set[int]:
    """Intervals on a cycle or between two: what no order reaches from the front nor from the back."""
    num, known = len(network.intervals), set(network.order)
    stuck = {i for i in range(num) if i not in known or (network.is_held(i) and num + i not in known)}
    while stuck:
        used = {source for i in stuck for source in network.arc_sources(i) if source in stuck}
        if used == stuck:
            break
        stuck = used
    return stuck


def _event(arc: Arc, end_arcs: Sequence[Sequence[Arc]], num: int) -> int:
    """The event that must be known before the arc's point is."""
    return num + arc.source if arc.inside_ns == END and end_arcs[arc.source] else arc.source
