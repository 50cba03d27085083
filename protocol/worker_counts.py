"""What a worker counts, as its owner and the metrics' page take it."""

from typing import Literal

import msgspec

from protocol.stages import StageNs

TierName = Literal["device", "host", "windows", "disk"]
"""Where KV lies. `windows` are those of DeepSeek's models, kept in host memory beside its blocks."""


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tier. The first four say what is there now, the rest counts since the start; None: not counted.

    `hits` and `misses` are entries that were asked for; `loads` came from this tier to the one before it,
    `stores` were kept here; `drops` were not, for want of room or because too much was waiting.
    """

    tier: TierName
    entries: int
    bytes: int
    queued: int | None = None  # reads and writes that wait
    queued_bytes: int | None = None  # of the writes among them
    hits: int | None = None
    misses: int | None = None
    loads: int | None = None
    stores: int | None = None
    evictions: int = 0
    expired: int | None = None
    drops: int | None = None
    failures: int | None = None  # of the system, and files that were not whole


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`role` tells the workers of a deployment apart."""

    role: str
    steps: int
    rows: int
    blocks_total: int
    blocks_held: int
    preemptions: int
    swapped_bytes: int
    loaded_tokens: int  # of prefixes that came from host memory, into which disk loads first
    tiers: tuple[TierCounts, ...]
    stages: StageNs | None = None  # of all steps of a model that has stages
