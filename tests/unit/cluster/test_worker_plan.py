"""What a plan promises to workers is all that they may take."""

from pathlib import Path

import pytest

from cluster.config import DockyardConfig
from cluster.plan import Plan, plan_workers
from placement.topology import Core, Domain, Node, Topology
from protocol.errors import ResourceShortage

GIB = 1 << 30
FOLDER = Path(__file__).parents[2] / "data" / "v41_golden" / "b"


def machine(free_gib: int, total_gib: int = 64) -> Topology:
    cores = (Core(0, (0,)), Core(1, (1,)))
    return Topology((Node("local", (Domain(0, cores, total_gib * GIB, free_gib * GIB),)),))


def plan(path: Path, topology: Topology, **workers: object) -> Plan:
    config = DockyardConfig.model_validate({"model": str(path), "workers": workers})
    return plan_workers(config, path, topology)


def test_windows_are_a_share_of_a_tenth_and_counted() -> None:
    found = plan(FOLDER, machine(40))
    without = plan(FOLDER, machine(40), tiers={"window_bytes": 0})
    for worker, bare in zip(found.workers, without.workers, strict=True):
        assert worker.engine.tiers.window_bytes == 2 * GIB
        assert worker.memory_bytes == bare.memory_bytes + 2 * GIB
        assert bare.engine.tiers.window_bytes == 0


def test_one_worker_has_the_whole_tenth() -> None:
    (worker,) = plan(FOLDER, machine(40), disaggregated=False).workers
    assert worker.engine.tiers.window_bytes == 4 * GIB


def test_windows_that_are_set_are_promised_or_refused() -> None:
    found = plan(FOLDER, machine(40), tiers={"window_bytes": 3 * GIB})
    assert {worker.engine.tiers.window_bytes for worker in found.workers} == {3 * GIB}
    with pytest.raises(ResourceShortage):
        plan(FOLDER, machine(8), tiers={"window_bytes": 3 * GIB})


def test_a_model_in_a_file_keeps_no_windows(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    found = plan(path, machine(40))
    assert {worker.engine.tiers.window_bytes for worker in found.workers} == {0}


def test_the_other_tiers_stay_as_they_are_set() -> None:
    found = plan(FOLDER, machine(40), tiers={"host_bytes": GIB, "policy": "write_back"})
    for worker in found.workers:
        assert (worker.engine.tiers.host_bytes, worker.engine.tiers.policy) == (GIB, "write_back")
