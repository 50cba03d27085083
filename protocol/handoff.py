"""What a prefill worker gives to a decode worker: one versioned, checksummed value.

The header crosses as msgpack, the KV beside it as one contiguous array of bytes (`KvPayload`), which Ray's
object store carries without a copy. Leaving anything out would be silently wrong, so the header names the
model, the layout and every count, and the decode worker refuses what does not match.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams
from protocol.stages import StageNs

HANDOFF_VERSION = 5

KvPayload = NDArray[np.uint8]
StateLayout = tuple[tuple[str, int, int], ...]
"""Of each part of a payload, in order: its name, its rows, bytes a row."""


class StageTimes(msgspec.Struct, frozen=True):
    """CLOCK_MONOTONIC nanoseconds of the prefill worker's host."""

    arrived_ns: int
    scheduled_ns: int
    prefilled_ns: int
    spent: StageNs | None = None  # by the steps so far, where the model has stages


class HandoffHeader(msgspec.Struct, frozen=True):
    version: int
    request_id: str
    model: str  # fingerprint of the weights
    layout: StateLayout
    dtype: str
    bounds: tuple[int, int, int, int]  # of the rows: start, write_from, window_from, decoder_from
    crc32: int  # of the payload
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]  # the first token, chosen by the prefill worker
    num_cached: int
    priority: int
    sampling: SamplingParams
    stages: StageTimes
    resumed: tuple[int, ...] = ()  # where windows were run again behind a cached prefix
    choice: int = 0  # which of the request's outputs
    choices: int = 1
    cache_salt: str = ""
    slack_ms: float = 0.0
    num_begun: int = 0  # of the generated ids, those that another worker gave out before this prefill
    images: tuple[tuple[int, int, str], ...] = ()  # among the prompt's tokens: start, stop, digest


def encode_header(header: HandoffHeader) -> bytes:
    return msgspec.msgpack.encode(header)


def decode_header(data: bytes) -> HandoffHeader:
    """Raises msgspec.DecodeError on bytes that are no header."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HandoffHeader)
    return decoder.decode(data)
