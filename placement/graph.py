"""The one typed door to networkx: an undirected graph of named places with distances."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidInput


def _networkx() -> Any:
    """Loaded with the first graph: it takes half a second, and most commands make none. It has no type stubs
    that a strict checker accepts; nothing untyped leaves this file."""
    import networkx

    return networkx


@dataclass(frozen=True, slots=True)
class Link:
    """Two places and the distance between them; smaller is closer, and the unit is up to the maker."""

    a: str
    b: str
    distance: float


class Graph:
    """Places and the links between them. Never changes once it is made; safe from any thread."""

    def __init__(self, places: Iterable[str], links: Iterable[Link]) -> None:
        self._graph: Any = _networkx().Graph()
        self._graph.add_nodes_from(places)
        for link in links:
            self._graph.add_edge(link.a, link.b, weight=link.distance)

    @property
    def places(self) -> tuple[str, ...]:
        """Every place, in the order of making."""
        return tuple(self._graph.nodes)

    def distance(self, a: str, b: str) -> float:
        """Length of the shortest way; infinite where there is none. InvalidInput for an unknown place."""
        self._check(a)
        self._check(b)
        nx = _networkx()
        try:
            return float(nx.shortest_path_length(self._graph, a, b, weight="weight"))
        except nx.NetworkXNoPath:
            return float("inf")

    def _check(self, place: str) -> None:
        if place not in self._graph:
            raise InvalidInput(f"topology: no place {place!r}", hint=f"one of {', '.join(self.places)}")
