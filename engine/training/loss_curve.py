"""A training's log as a few points: for the model card."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from engine.training.model_card import LossPoint

_POINTS = 12
_HELD_OUT = "held_out_bits_per_byte"
Record = Mapping[str, float]


def loss_curve(log: Path) -> tuple[LossPoint, ...]:
    """Evenly spread over the tokens seen, without what a stopped training did after its last checkpoint."""
    records = _of_one_training(json.loads(line) for line in log.read_text().splitlines())
    if not records:
        return ()
    last = records[-1]["seen"]
    points: list[LossPoint] = []
    for number in range(_POINTS):
        low, high = (last * (number + end) / _POINTS for end in (0, 1))
        part = [record for record in records if low < record["seen"] <= high]
        nats = [record["nats"] for record in part if "nats" in record]
        held_out = [record[_HELD_OUT] for record in part if _HELD_OUT in record]
        if nats:
            points.append(LossPoint(int(part[-1]["seen"]), mean(nats), held_out[-1] if held_out else None))
    return tuple(points)


def _of_one_training(records: Iterable[Any]) -> list[Record]:
    """A training that goes on from a checkpoint sees the tokens behind it again."""
    kept: list[Record] = []
    for record in records:
        if "seen" not in record:  # of the drafts
            continue
        while kept and kept[-1]["seen"] > record["seen"]:
            kept.pop()
        kept.append(record)
    return kept
