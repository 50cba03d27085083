"""What a plan promises to workers is all that they may take."""

from pathlib import Path

import pytest

from cluster.config import DockyardConfig, WorkersConfig
from cluster.plan import Plan, plan_workers
from engine.config import EngineConfig
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


def test_what_the_configuration_says_of_workers_reaches_their_engines() -> None:
    said = {"replay": False, "max_waiting": 7, "starvation_s": 3.0, "token_budget": 99, "max_sequences": 5}
    for worker in plan(FOLDER, machine(40), **said).workers:
        assert worker.engine.model_dump(include=set(said)) == said


def test_all_that_an_engine_can_be_told_can_be_told_to_a_server() -> None:
    """But for what it gives by itself: model, role, and how many batches `kv_events` keeps."""
    missing = EngineConfig.model_fields.keys() - WorkersConfig.model_fields.keys()
    assert missing == {"model", "role", "kv_event_batches"}


def test_left_out_means_the_same_to_an_engine_and_to_a_server() -> None:
    for name in ("replay", "max_waiting", "starvation_s", "token_budget", "caches", "preemption"):
        assert WorkersConfig.model_fields[name].default == EngineConfig.model_fields[name].default
