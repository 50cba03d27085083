"""What a sandbox's layer holds, kept as a snapshot or given to forks."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

from sandbox.arguments import check_whole
from sandbox.errors import translated
from sandbox.life import Life
from sandbox.limits import MIB
from sandbox.making import Made, make
from sandbox.orders import Order
from sandbox.snapshots import Snapshot, Snapshots, Source
from sandbox.substrates.base import HOSTNAME


class Fork(Protocol):
    """A sandbox that has come up."""

    @property
    def id(self) -> str: ...
    def kill(self) -> None: ...


T = TypeVar("T", bound=Fork)


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

    def forks(
        self, count: int, begin: Callable[[Made], T], copies_of: "Callable[[T], Copies]"
    ) -> tuple[T, ...]:
        """See `Sandbox.fork_fs`. `begin` takes over what was made, `copies_of` gives a fork's own."""
        forks: list[T] = []
        doing = translated(f"forking sandbox {self._info.id}")
        with doing, ExitStack() as busy, ExitStack() as on_failure:
            busy.enter_context(self._life.busy())  # as all are that wait for the last one
            for number in range(count):
                # Those after the first are copied from that, which nobody has yet, and this one goes on.
                still = self._life.held() if number == 0 else nullcontext()
                source = (copies_of(forks[0]) if forks else self).source()
                with still, source.opened() as content:
                    made = make(self._fork_order(), replace(content, of=self._info.id))
                    forks.append(begin(made))
                    on_failure.callback(forks[-1].kill)
                    busy.enter_context(copies_of(forks[-1])._life.busy())
                    source.check()
                    self._made.log.write("fork", into=forks[-1].id)
            on_failure.pop_all()
        return tuple(forks)

    def source(self) -> Source:
        """Where the layer is."""
        info, made = self._info, self._made
        return Source(
            info.id, info.image, info.substrate, made.launched.layer_at, made.first_id, self._check,
            made.order.state_dir, made.within,
        )  # fmt: skip

    def _fork_order(self) -> Order:
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
