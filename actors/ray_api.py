"""The one door to Ray: the few calls that Dockyard makes of it, typed.

Ray starts, places and watches long-lived processes and moves large arrays between them; it is on no hot path.
Ray is imported at the first call: it reads its settings from the environment at import, and its owner sets
them (the token, the usage statistics) before.
"""

import logging
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ActorHandle = Any  # Ray makes handles at run time; each user wraps one in a typed shell


def _ray() -> Any:
    import ray

    return ray


def start(*, num_cpus: int, object_store_bytes: int, temp_dir: Path, namespace: str) -> None:
    """Start a cluster of one node that dies with this process. Blocks for some seconds."""
    with _sigterm_kept():
        _ray().init(
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            _temp_dir=str(temp_dir),
            namespace=namespace,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            configure_logging=False,
        )


@contextmanager
def _sigterm_kept() -> Generator[None]:
    """Ray's `init` puts a handler of its own on SIGTERM, which exits with 15; the caller's one stays."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray sets none there
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop() -> None:
    """End the cluster that `start` began. Harmless when there is none."""
    _ray().shutdown()


def create_actor(cls: type, *arguments: Any, name: str, num_cpus: float, max_concurrency: int) -> ActorHandle:
    """Start an actor; returns at once. It is not restarted when it dies: its owner decides."""
    options = (
        _ray()
        .remote(cls)
        .options(name=name, num_cpus=num_cpus, max_concurrency=max_concurrency, max_restarts=0)
    )
    return options.remote(*arguments)


def get(reference: Any, timeout_s: float) -> Any:
    """The value of a call. Raises ray's GetTimeoutError, RayActorError, or what the call raised."""
    return _ray().get(reference, timeout=timeout_s)


def on_failure(reference: Any, callback: Callable[[BaseException], None]) -> None:
    """Call back, from another thread, if the call fails."""

    def check(done: Any) -> None:
        if (error := done.exception()) is not None:
            callback(error)

    reference.future().add_done_callback(check)


def kill(actor: ActorHandle) -> None:
    """End an actor's process at once."""
    _ray().kill(actor)
