"""Which bin a sandbox goes to, and why: filter, sample, score, and the bin's own admission.

A `Placer` is one of several equal replicas. It decides on a view that may be old, plus its own placements
since, taken as many times as there are replicas, for the others place as much as it does. The bin has the
last word. Nothing is agreed on globally.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from placement.amounts import Amounts, needed
from placement.bins import Admission, Bin, BinState
from protocol.errors import InvalidInput, ResourceShortage
from protocol.resources import Resources


@dataclass(frozen=True, slots=True)
class Step:
    """One bin that was looked at: what the placer or the bin itself said of it."""

    bin: str
    said: str


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """Where a sandbox went; `bin` is None where no bin took it. `steps` tell the reasons in order."""

    sandbox_id: str
    bin: str | None
    steps: tuple[Step, ...]
    asked: int  # bins that were asked to admit: round trips

    def require(self) -> str:
        """The bin's name, or ResourceShortage with what each bin lacks."""
        if self.bin is None:
            raise ResourceShortage(
                f"no bin takes sandbox {self.sandbox_id}: {self._reasons() or 'there is no bin'}",
                hint="ask for less, end other sandboxes, or add a machine",
            )
        return self.bin

    def describe(self) -> str:
        """For people: where, and what was said of each bin on the way."""
        return f"{self.sandbox_id}: {self.bin or 'refused'}\n" + "\n".join(
            f"  {step.bin}: {step.said}" for step in self.steps
        )

    def _reasons(self) -> str:
        last = {step.bin: step.said for step in self.steps}  # what was said last is true
        return "; ".join(f"{name}: {said}" for name, said in last.items())


class Placer:
    """One replica. Not safe from several threads at once; deterministic for a seed and a history.

    `bins`: how to ask each bin. `sample`: how many candidates are scored; 2 of many spreads nearly as well as
    all of them, and replicas that sample differently do not all run to the same emptiest bin.
    """

    def __init__(
        self, bins: Mapping[str, Admission], rng: random.Random, *, sample: int = 2, replicas: int = 1
    ) -> None:
        if sample < 1 or replicas < 1:
            raise InvalidInput(f"sample {sample} and replicas {replicas} must be 1 or more")
        self._bins = dict(bins)
        self._rng = rng
        self._sample = sample
        self._replicas = replicas
        self._view: dict[str, BinState] = {}
        self._recent: dict[str, Amounts] = {}  # own placements since the bin's last heartbeat
        self._where: dict[str, str] = {}

    def heartbeat(self, states: Iterable[BinState]) -> None:
        """Take in the states that bins have sent; news older than what is known is dropped."""
        for state in states:
            if self._learn(state):
                self._recent.pop(state.name, None)

    def place(self, sandbox_id: str, resources: Resources) -> SandboxChoice:
        """Find a bin and have it admit the sandbox. Blocks for a round trip to each bin that is asked.

        No bin is given up on the strength of an old view: those that seem full are asked last.
        """
        demand = needed(resources)
        steps: list[Step] = []
        seem_fit, seem_full = self._filter(demand, steps)
        asked = 0
        while seem_fit or seem_full:
            name, why = self._next(seem_fit, seem_full, demand)
            asked += 1
            answer = self._bins[name].admit(sandbox_id, demand)
            self._learn(answer.state)
            if answer.admitted:
                self._where[sandbox_id] = name
                self._recent[name] = self._recent.get(name, Amounts()).plus(demand)
                steps.append(Step(name, f"admitted, {why}"))
                return SandboxChoice(sandbox_id, name, tuple(steps), asked)
            steps.append(Step(name, answer.reason))
        return SandboxChoice(sandbox_id, None, tuple(steps), asked)

    def release(self, sandbox_id: str) -> None:
        """Give back what the sandbox held. Nothing happens for one that this replica has not placed."""
        name = self._where.pop(sandbox_id, None)
        if name is not None:
            self._learn(self._bins[name].release(sandbox_id))

    def _filter(self, demand: Amounts, steps: list[Step]) -> tuple[list[str], list[str]]:
        """Bins that seem to have room, and those that do not but could, were the view wrong."""
        seem_fit: list[str] = []
        seem_full: list[str] = []
        for name in self._bins:
            state = self._view.get(name)
            if state is None:
                seem_fit.append(name)
            elif not demand.fits_into(state.capacity):
                steps.append(Step(name, f"too small: {demand.lacking(state.capacity)}"))
            elif not demand.fits_into(state.capacity.minus(self._expected(state))):
                seem_full.append(name)
            else:
                seem_fit.append(name)
        return seem_fit, seem_full

    def _next(self, seem_fit: list[str], seem_full: list[str], demand: Amounts) -> tuple[str, str]:
        """Take the best of a sample out of the candidates."""
        source = seem_fit or seem_full
        sampled = self._rng.sample(source, min(self._sample, len(source)))
        shares = {name: self._share_after(name, demand) for name in sampled}
        best = min(sampled, key=lambda name: (shares[name], name))
        source.remove(best)
        others = ", ".join(f"{name} {shares[name]:.0%}" for name in sampled if name != best)
        return best, f"{shares[best]:.0%} full after it{f' against {others}' if others else ''}"

    def _share_after(self, name: str, demand: Amounts) -> float:
        """How full the bin's scarcest amount would be; 0 for a bin that nothing is known of yet."""
        state = self._view.get(name)
        if state is None:
            return 0.0
        return self._expected(state).plus(demand).largest_share_of(state.capacity)

    def _expected(self, state: BinState) -> Amounts:
        """What is used by now: what was heard, and what the other replicas have placed since."""
        return state.used.plus(self._recent.get(state.name, Amounts()), self._replicas - 1)

    def _learn(self, state: BinState) -> bool:
        known = self._view.get(state.name)
        if known is not None and known.version > state.version:
            return False
        self._view[state.name] = state
        return True


def placer_of(bins: Sequence[Bin], rng: random.Random, *, sample: int = 2) -> Placer:
    """A single placer over bins of this process, which knows their state."""
    states = [one.state() for one in bins]
    placer = Placer({state.name: one for state, one in zip(states, bins, strict=True)}, rng, sample=sample)
    placer.heartbeat(states)
    return placer
