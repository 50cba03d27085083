"""What a sandbox's layer holds, kept as a snapshot or given to forks."""

import secrets
from dataclasses import replace

from sandbox.arguments import check_whole
from sandbox.errors import translated
from sandbox.life import Life
from sandbox.limits import MIB
from sandbox.making import Made
from sandbox.orders import Order
from sandbox.snapshots import Snapshot, Snapshots, Source
from sandbox.substrates.base import HOSTNAME


class Copies:
    """Of one sandbox. Thread-safe."""

    def __init__(self, made: Made, life: Life) -> None:
        self._made, self._info, self._life = made, made.info, life

    def keep(self, name: str | None, max_mb: int | None) -> Snapshot:
        """See `Sandbox.snapshot`."""
        with translated("taking a snapshot", sandbox_id=self._info.id), self._life.held():
            store = Snapshots(self._made.order.state_dir)
            name = f"snap-{secrets.token_hex(6)}" if name is None else name
            kept = store.keep(self.source(), name, max_bytes=self._content_limit(max_mb))
            try:
                self._made.log.write("snapshot", name=name, content_bytes=kept.content_bytes)
            except BaseException:
                kept.delete()
                raise
            return kept

    def source(self) -> Source:
        """Where the layer is."""
        info, made = self._info, self._made
        return Source(
            info.id, info.image, info.substrate, made.launched.open_layer, made.first_id, self._check,
            made.order.state_dir, made.within,
        )  # fmt: skip

    def fork_order(self) -> Order:
        """What a fork is made by: this one's order, the network as it is now."""
        connection = self._made.ownership.connection
        network = "none" if connection is None else connection.network
        return replace(
            self._made.order,
            policy=self._made.order.policy.model_copy(update={"network": network}),
            hostname=f"{HOSTNAME}-{secrets.token_hex(4)}",
            snapshot=None,
        )

    def _check(self) -> None:
        if (gone := self._life.gone()) is not None:
            raise gone

    def _content_limit(self, max_mb: int | None) -> int:
        if max_mb is not None:
            check_whole("max_mb", max_mb, 1, 1 << 24)
        return 2 * self._info.limits.disk_bytes if max_mb is None else max_mb * MIB
