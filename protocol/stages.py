"""The stages of a step of a model that has them, and the time that a request's steps have spent in each."""

from typing import Literal

import msgspec

Stage = Literal["encoder", "bridge", "decoder"]
STAGES: tuple[Stage, ...] = ("encoder", "bridge", "decoder")


class StageNs(msgspec.Struct, frozen=True):
    """Nanoseconds of whole steps: requests that share one have all of its time."""

    encoder: int = 0
    bridge: int = 0
    decoder: int = 0

    def of(self, stage: Stage) -> int:
        return {"encoder": self.encoder, "bridge": self.bridge, "decoder": self.decoder}[stage]

    def minus(self, other: "StageNs") -> "StageNs":
        return StageNs(self.encoder - other.encoder, self.bridge - other.bridge, self.decoder - other.decoder)

    def plus(self, other: "StageNs") -> "StageNs":
        return StageNs(self.encoder + other.encoder, self.bridge + other.bridge, self.decoder + other.decoder)
