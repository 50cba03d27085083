"""What sandboxes go without on this host though it is wanted by default: said once in a process."""

import logging
import threading
from collections.abc import Sequence

from sandbox.forks import free_in_children

_LOG = logging.getLogger("dockyard.sandbox")
_told: set[str] = set()
_lock = threading.Lock()  # guards it
free_in_children(_lock)


def tell_once(lacking: Sequence[str]) -> None:
    """Warns of what this process has not been told yet: on standard error, unless it has set up logging."""
    with _lock:
        new = [each for each in lacking if each not in _told]
        _told.update(new)
    if new:
        _LOG.warning("dockyard: sandboxes lack on this host: %s (see `dockyard doctor`)", "; ".join(new))
