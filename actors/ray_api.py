"""The one door to Ray: the few calls that Dockyard makes of it, typed.

Ray starts, places and watches long-lived processes and moves large arrays between them; it is on no hot path.
Ray is imported at the first call: it reads its settings from the environment at import, and its owner sets
them (the token, the usage statistics) before.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

ActorHandle = Any  # Ray makes handles at run time; each user wraps one in a typed shell


def _ray() -> Any:
    import ray

    return ray


def start(*, num_cpus: int, object_store_bytes: int, temp_dir: Path, namespace: str) -> None:
    """Start a cluster of one node that dies with this process. Blocks for some seconds.

    The caller holds SIGTERM back: Ray puts handlers on it, in Python one that exits with 15 and in C++ one
    that aborts, and they stay until the caller sets its own again.
    """
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


def stop() -> None:
    """End the cluster that `start` began, or half began. Harmless when there is none."""
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


def is_done(reference: Any, timeout_s: float) -> bool:
    """Whether a call has ended, well or not, within the time. Blocks."""
    done, _ = _ray().wait([reference], timeout=timeout_s)
    return bool(done)


def on_failure(reference: Any, callback: Callable[[BaseException], None]) -> None:
    """Call back, from another thread, if the call fails."""

    def check(done: Any) -> None:
        if (error := done.exception()) is not None:
            callback(error)

    reference.future().add_done_callback(check)


def kill(actor: ActorHandle) -> None:
    """End an actor's process at once."""
    _ray().kill(actor)
