"""Folders that are made beside their place, of which no more is wanted.

One that cannot be removed (no descriptor is free, say) would stay for as long as this process lives, since a
draft is its maker's: it is tried again before the next one is made.
"""

import os
from pathlib import Path

from sandbox.host_tree import remove_tree

_left = set[Path]()


def discard(draft: Path) -> None:
    """Removes it, now or later. One that is not there is no error."""
    remove_tree(draft)
    if os.path.lexists(draft):
        _left.add(draft)


def discard_left() -> None:
    """Those that did not go before."""
    for draft in list(_left):
        _left.discard(draft)
        discard(draft)
