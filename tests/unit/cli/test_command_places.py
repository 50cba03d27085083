"""The memory that a command's sandboxes may be promised: what is free and promised to no worker."""

from pathlib import Path

import pytest

from cli.placing import SandboxPlaces
from cluster.plan import this_machine
from protocol.errors import ResourceShortage
from protocol.resources import Resources

SMALL = Resources(1.0, 16 << 20, 8, 1 << 20)


def test_free_memory_is_promised_once(tmp_path: Path) -> None:
    places = SandboxPlaces(tmp_path, {})
    place = places.take("agent", SMALL)
    places.release(place)
    assert places.num_placed == 1


def test_what_workers_may_still_take_is_not_promised_to_sandboxes(tmp_path: Path) -> None:
    every_byte = {place: domain.memory_bytes for _, domain, place in this_machine().domains()}
    with pytest.raises(ResourceShortage, match="memory"):
        SandboxPlaces(tmp_path, every_byte).take("agent", SMALL)
