"""Host memory and disk behind the device's blocks: what the engine keeps there, and what it finds again.

Blocks and windows are known by the keys of the prefix cache, so an entry fits wherever its key is asked for.
Windows stay in host memory, for minutes; on disk they are kept too where a model may not run them again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cache.disk_thread import DiskQueue, DiskThread
from engine.cache.disk_tier import DiskStatistics, DiskTier
from engine.cache.entry import HEADER_BYTES, Kind, model_tag
from engine.cache.events import Watch
from engine.cache.host_tier import HostStatistics, HostTier
from engine.cache.prefetch import Prefetch
from engine.cache.tier_config import TierConfig
from engine.model.bounds import Held
from protocol.clock import Clock
from protocol.handoff import KvPayload

_WAITING_BYTES = 256 << 20  # of writes to the disk


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """`disk` is None without one. `prefetched` entries were asked of the disk before their request ran."""

    blocks: HostStatistics
    windows: HostStatistics
    disk: DiskStatistics | None
    prefetched: int
    dropped_writes: int  # for which too much waited for the disk already
    queue: DiskQueue


class Tiers:
    """A KeptKv (engine.scheduler.kept). Owned by the engine's thread; the disk's thread runs beside it."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        model: str,
        *,
        windows_on_disk: bool,
        bytes_of: Callable[[Held], int],
        watch_host: Watch | None = None,
        watch_disk: Watch | None = None,
    ) -> None:
        """`bytes_of`: a sequence's whole state. `watch_…` hear of the tiers' blocks. Raises UnusableTier,
        and ResourceShortage where there is no thread for the disk."""
        self.config = config
        self._clock, self._bytes_of, self._windows_on_disk = clock, bytes_of, windows_on_disk
        self._tag = model_tag(model, "")
        self._disk: DiskThread | None = None
        if config.disk_path:
            tier = DiskTier(
                Path(config.disk_path).expanduser(),
                config.disk_bytes,
                config.disk_ttl_s,
                reads_at_once=False,
                watch=watch_disk,
            )
            self._disk = DiskThread(tier, _WAITING_BYTES, clock)
        self.blocks = HostTier(config.host_bytes, clock, on_evict=self._evicted, watch=watch_host)
        self.windows_tier = HostTier(config.most_window_bytes, clock, ttl_ns=int(config.window_ttl_s * 1e9))
        self._prefetches: set[Prefetch] = set()
        self._prefetched = 0
        self._done: deque[Prefetch] = deque()  # the disk's thread appends

    @property
    def keeps_blocks(self) -> bool:
        return self.config.host_bytes > 0

    @property
    def keeps_at_once(self) -> bool:
        """Whether blocks are kept as soon as they are full."""
        return self.keeps_blocks and self.config.policy == "write_through"

    def block(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        return self.blocks.get(key, again=again) if self.keeps_blocks else None

    def windows(self, key: bytes, *, again: bool = False) -> KvPayload | None:
        return self.windows_tier.get(key, again=again)

    def reserve(self, held: Held) -> bool:
        return self.blocks.reserve(self._bytes_of(held))

    def free(self, num_bytes: int) -> None:
        """Of a swapped sequence that is back, or gone."""
        self.blocks.free(num_bytes)

    def keep_block(self, key: bytes, payload: KvPayload) -> None:
        self.blocks.put(key, payload)
        if self._disk is not None and self.config.policy == "write_through":
            self._disk.store("block", key, self._tag, payload)

    def keep_windows(self, key: bytes, payload: KvPayload) -> None:
        self.windows_tier.put(key, payload)
        if self._disk is not None and self._windows_on_disk:
            self._disk.store("windows", key, self._tag, payload)

    def drop_block(self, key: bytes) -> None:
        """From host memory, unless it is pinned; on disk it stays."""
        self.blocks.drop(key)

    def drop_windows(self, key: bytes) -> None:
        """Newer ones of the same sequence are kept; on disk they stay."""
        self.windows_tier.drop(key)

    def is_kept(self, key: bytes) -> bool:
        """Whether a block is in host memory or, as far as the folder's index tells, on disk."""
        if not self.keeps_blocks:
            return False
        return key in self.blocks or (self._disk is not None and self._disk.contains("block", key))

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def until_read(self) -> Prefetch | None:
        """Something to wait for until it is known what the disk has; None where it is."""
        if self._disk is None or self._disk.is_read:
            return None
        found = self._new_prefetch()
        found.expect()
        found.seal()
        self._disk.when_read(found.count_arrived)
        return found

    def prefetch(
        self, path: Sequence[bytes], away: Iterable[bytes], deadline_ns: int | None = None
    ) -> Prefetch | None:
        """Bring a prefix from disk to host memory; None where there is nothing to wait for.

        `path`: keys of its known blocks in order; `away`: of those among them that are not on the device.
        `deadline_ns`: of a request that has waited before, for what the disk has.
        """
        if self._disk is None:
            return None
        found = self._new_prefetch(deadline_ns)
        for key in away:
            self._bring(found, "block", self.blocks, key)
        if self._windows_on_disk:
            for key in reversed(path):
                if key in self.windows_tier:
                    break
                if self._disk.contains("windows", key):
                    self._bring(found, "windows", self.windows_tier, key)
                    break
        if not found.seal():
            self.end(found)
            return None
        return found

    @property
    def prefetches(self) -> frozenset[Prefetch]:
        """Those that have not been ended."""
        return frozenset(self._prefetches)

    def take_done(self) -> list[Prefetch]:
        """Those that have come since it was last asked; some may have been ended meanwhile."""
        found: list[Prefetch] = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def end(self, prefetch: Prefetch) -> None:
        """Its request has its blocks, or is gone."""
        prefetch.release()
        self._prefetches.discard(prefetch)

    def renew(self, model: str, version: str) -> None:
        """Other weights: what is in host memory fits no more. Files stay, under keys that nobody asks for."""
        self._tag = model_tag(model, version)
        for prefetch in list(self._prefetches):
            self.end(prefetch)
        self.blocks.clear()
        self.windows_tier.clear()

    def flush(self) -> None:
        """Blocks until the disk has done what it was asked for."""
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Ends the disk's thread, behind the writes that wait. Write-back writes host memory first."""
        if self._disk is None:
            return
        if self.config.policy == "write_back":
            for key, payload in self._newest_for_disk():
                self._disk.store("block", key, self._tag, payload, bounded=False)
        self._disk.close()

    def _newest_for_disk(self) -> list[tuple[bytes, KvPayload]]:
        """Of host memory, what fits on disk: least recently used first, as the disk gives entries up."""
        room = self.config.disk_bytes
        kept: list[tuple[bytes, KvPayload]] = []
        for key, payload in reversed(self.blocks.entries()):
            room -= payload.nbytes + HEADER_BYTES
            if room < 0:
                break
            kept.append((key, payload))
        return kept[::-1]

    def statistics(self) -> TierStatistics:
        disk = None if self._disk is None else self._disk.statistics()
        dropped = 0 if self._disk is None else self._disk.dropped
        queue = DiskQueue() if self._disk is None else self._disk.queue()
        return TierStatistics(
            self.blocks.statistics(), self.windows_tier.statistics(), disk, self._prefetched, dropped, queue
        )

    def check_integrity(self, reserved_bytes: int) -> None:
        """`reserved_bytes`: of the engine's swapped sequences. Raises AssertionError."""
        pinned = sum(prefetch.num_pins for prefetch in self._prefetches)
        if all(prefetch.done for prefetch in self._prefetches):
            both = self.blocks.statistics().pinned + self.windows_tier.statistics().pinned
            assert both == pinned, "an entry is pinned for nobody, or not for its owner"
        assert self.blocks.statistics().reserved_bytes == reserved_bytes, "room is reserved for nobody"
        self.blocks.check_integrity()
        self.windows_tier.check_integrity()
        if self._disk is not None:
            self._disk.check_integrity()

    def _new_prefetch(self, deadline_ns: int | None = None) -> Prefetch:
        if deadline_ns is None:
            deadline_ns = self._clock.now_ns() + int(self.config.load_timeout_s * 1e9)
        found = Prefetch(deadline_ns, self._done.append)
        self._prefetches.add(found)
        return found

    def _bring(self, prefetch: Prefetch, kind: Kind, tier: HostTier, key: bytes) -> None:
        if key in tier:
            prefetch.hold(tier, key)
            return
        assert self._disk is not None
        self._prefetched += 1
        prefetch.expect()
        self._disk.load(
            kind, key, self._tag,
            lambda payload: prefetch.arrived(tier, key, payload), lambda: prefetch.wanted,
        )  # fmt: skip

    def _evicted(self, key: bytes, payload: KvPayload) -> None:
        """Host memory has given a block up; it may be in the disk's thread, which takes what is stored."""
        if self._disk is not None and self.config.policy == "write_back":
            self._disk.store("block", key, self._tag, payload)
