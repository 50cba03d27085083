"""The three stages of a V4.1 step, encoder, bridge and decoder: timed, and where one may stop between them.

Source: fact sheet, sections 1.2 and 1.3. The encoder is the layers before the cut; the bridge is what the
layer at the cut leaves of all rows, its keys and values; the decoder is the rest of that layer, the layers
behind it and the head. Pure: nothing here knows a tensor.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.stages import STAGES, Stage, StageNs

__all__ = ["STAGES", "Stage", "StageClock", "StageInterrupted", "StageTimes"]


class StageInterrupted(Exception):
    """A step has ended between two stages. No error: what a sequence has is as it was before the step."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Nanoseconds since the weights were loaded; a model that has no cut counts as decoder alone."""

    encoder_ns: int = 0
    bridge_ns: int = 0
    decoder_ns: int = 0
    steps: int = 0  # that ran to their end
    interrupted: int = 0  # steps; what they had run is counted

    @property
    def total_ns(self) -> int:
        return self.encoder_ns + self.bridge_ns + self.decoder_ns

    def of(self, stage: Stage) -> int:
        return {"encoder": self.encoder_ns, "bridge": self.bridge_ns, "decoder": self.decoder_ns}[stage]


class StageClock:
    """Owned by the engine's thread; `interrupt` alone may be called from any."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns, self._at = now_ns, 0
        self._spent: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self._steps = self._interrupted = 0
        self._wanted = self._allowed = self._ended_early = False

    def begin(self, *, interruptible: bool) -> None:
        """A step begins. Behind one that was interrupted it runs through, so that work always goes on."""
        self._allowed = interruptible and not self._ended_early
        self._ended_early = self._wanted = False
        self._at = self._now_ns()

    def passed(self, stage: Stage) -> None:
        """A stage has run. Raises StageInterrupted where that was asked for, and another one follows."""
        now = self._now_ns()
        self._spent[stage] += now - self._at
        self._at = now
        if stage == "decoder":
            self._steps += 1
        elif self._wanted and self._allowed:
            self._ended_early = True
            self._interrupted += 1
            raise StageInterrupted

    def interrupt(self) -> None:
        """The step that runs ends before its next stage, where it may. Nothing where none runs."""
        self._wanted = True

    def spent(self) -> StageNs:
        """Since the weights were loaded."""
        return StageNs(**self._spent)

    def times(self) -> StageTimes:
        spent = self._spent
        return StageTimes(spent["encoder"], spent["bridge"], spent["decoder"], self._steps, self._interrupted)
