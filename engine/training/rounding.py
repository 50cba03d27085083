"""What the released formats make of values in training: rounded forward, untouched on the way back."""

import torch
from torch import Tensor

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.records import IndexRecord, Record, Records
from engine.training.sublayers import Round, Rounding


def released_rounding(config: DeepseekConfig) -> Rounding:
    """Caches as `config.quantisation` says; expert weights in MXFP4 (fact sheet, sections 3, 4 and 13)."""
    records = Records.of(config)
    return Rounding(
        window=rounds_by(records.window),
        main=rounds_by(records.main),
        index=rounds_by(records.index),
        experts=_expert_weights,
    )


def rounds_by(record: Record) -> Round:
    """The held values to the bit; the gradient of x itself."""

    def rounded(x: Tensor) -> Tensor:
        with torch.no_grad():
            held = record.decode(record.encode(x.detach()))
        return held + (x - x.detach())

    return rounded


def _expert_weights(w_ENK: Tensor) -> Tensor:
    """Groups of 32 columns, as index keys have of their channels."""
    return rounds_by(IndexRecord(w_ENK.shape[-1]))(w_ENK)
