"""Sandboxes coming and going over bins, on a virtual clock and with the real placer and the real bins."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from placement.amounts import Amounts
from placement.bins import Bin
from placement.placer import Placer
from protocol.errors import InvalidInput
from protocol.resources import Resources


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sandbox that is wanted at `at_s` for `hold_s` seconds."""

    at_s: float
    hold_s: float
    demand: Resources


@dataclass(frozen=True, slots=True)
class Simulation:
    """What became of the arrivals."""

    admitted: int
    refused: int
    peak_live: int
    asks_per_placement: float  # round trips to bins for each arrival
    peak_share: float  # of the scarcest amount in the fullest bin, 0..1
    live_per_bin: dict[str, int]  # admissions in all, to see how evenly they were spread


def simulate(
    capacities: Sequence[Resources],
    arrivals: Sequence[Arrival],
    *,
    seed: int,
    sample: int = 2,
    replicas: int = 1,
    heartbeat_s: float = 1.0,
) -> Simulation:
    """Play the arrivals through `replicas` placers in turns, each hearing from all bins every `heartbeat_s`.

    Deterministic for a seed. At one moment, departures come before arrivals.
    """
    if heartbeat_s <= 0:
        raise InvalidInput(f"heartbeat_s: {heartbeat_s} must be above 0")
    world = _World(capacities, random.Random(seed), sample, replicas)
    next_heartbeat_s = 0.0
    for number, arrival in enumerate(sorted(arrivals, key=lambda a: a.at_s)):
        world.depart_until(arrival.at_s)
        if arrival.at_s >= next_heartbeat_s:
            world.heartbeat()
            next_heartbeat_s = arrival.at_s + heartbeat_s
        world.arrive(number, arrival)
    return world.result()


class _World:
    def __init__(
        self, capacities: Sequence[Resources], rng: random.Random, sample: int, replicas: int
    ) -> None:
        self._bins = {f"bin{number}": Bin(f"bin{number}", c) for number, c in enumerate(capacities)}
        self._placers = [
            Placer(self._bins, random.Random(rng.random()), sample=sample, replicas=replicas)
            for _ in range(replicas)
        ]
        self._departures: list[tuple[float, int, Placer]] = []
        self._live = 0
        self._peak_live = 0
        self._peak_share = 0.0
        self._asked = 0
        self._refused = 0
        self._admitted_by_bin = dict.fromkeys(self._bins, 0)

    def heartbeat(self) -> None:
        for placer in self._placers:
            placer.heartbeat(one.state() for one in self._bins.values())

    def arrive(self, number: int, arrival: Arrival) -> None:
        placer = self._placers[number % len(self._placers)]
        choice = placer.place(str(number), arrival.demand)
        self._asked += choice.asked
        if choice.bin is None:
            self._refused += 1
            return
        self._admitted_by_bin[choice.bin] += 1
        self._live += 1
        self._peak_live = max(self._peak_live, self._live)
        state = self._bins[choice.bin].state()
        self._peak_share = max(self._peak_share, state.used.largest_share_of(state.capacity))
        heapq.heappush(self._departures, (arrival.at_s + arrival.hold_s, number, placer))

    def depart_until(self, now_s: float) -> None:
        while self._departures and self._departures[0][0] <= now_s:
            _, number, placer = heapq.heappop(self._departures)
            placer.release(str(number))
            self._live -= 1

    def result(self) -> Simulation:
        self.depart_until(float("inf"))
        for one in self._bins.values():
            one.check_integrity()
            assert one.state().used == Amounts(), "a bin still holds something after the last departure"
        admitted = sum(self._admitted_by_bin.values())
        return Simulation(
            admitted,
            self._refused,
            self._peak_live,
            self._asked / max(1, admitted + self._refused),
            self._peak_share,
            self._admitted_by_bin,
        )
