"""The probe reads real files: of this machine, and of made ones with more than one domain."""

import os
from pathlib import Path

import pytest

from placement.graph import Graph, Link
from placement.probe import probe
from placement.topology import Topology
from protocol.errors import InvalidInput

GIB_KB = 1024 * 1024


def put(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two domains of two cores with two threads each, 64 GiB, a GPU at the second."""
    put(tmp_path, {"proc/meminfo": f"MemTotal: {64 * GIB_KB} kB\nMemAvailable: {60 * GIB_KB} kB"})
    total, free = f"{32 * GIB_KB} kB", f"{30 * GIB_KB} kB"
    for node in (0, 1):
        base = f"sys/devices/system/node/node{node}"
        put(
            tmp_path,
            {
                f"{base}/cpulist": f"{2 * node}-{2 * node + 1},{4 + 2 * node}-{5 + 2 * node}",
                f"{base}/meminfo": f"Node {node} MemTotal: {total}\nNode {node} MemFree: {free}",
            },
        )
    for cpu in range(8):
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        put(tmp_path, {f"{base}/core_id": str(cpu % 2), f"{base}/physical_package_id": str(cpu % 4 // 2)})
    put(tmp_path, {"proc/driver/nvidia/gpus/0000:3B:00.0/information": "Model: H200"})
    put(tmp_path, {"sys/bus/pci/devices/0000:3b:00.0/numa_node": "1"})
    put(tmp_path, {"sys/class/net/eth0/device/numa_node": "-1"})
    return tmp_path


def all_cpus(num: int = 8) -> frozenset[int]:
    return frozenset(range(num))


def test_this_machine_has_cores_and_memory():
    found = probe(frozenset(os.sched_getaffinity(0)))
    cpus = {cpu for _, domain, _ in found.domains() for core in domain.cores for cpu in core.cpus}
    assert cpus == os.sched_getaffinity(0)
    total = sum(domain.memory_bytes for _, domain, _ in found.domains())
    free = sum(domain.free_bytes for _, domain, _ in found.domains())
    assert 0 < free <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "usable cores" in found.describe()


def test_a_server_with_two_domains(server: Path):
    (node,) = probe(all_cpus(), root=server, name="big").nodes
    assert [[core.cpus for core in domain.cores] for domain in node.domains] == [
        [(0, 4), (1, 5)],
        [(2, 6), (3, 7)],
    ]
    assert [domain.memory_bytes for domain in node.domains] == [32 * 2**30] * 2
    assert [[d.name for d in domain.devices] for domain in node.domains] == [["eth0"], ["gpu0"]]


def test_only_cpus_that_the_process_may_use_count(server: Path):
    (node,) = probe(frozenset({1, 3, 7}), root=server).nodes
    assert [[core.cpus for core in domain.cores] for domain in node.domains] == [[(1,)], [(3, 7)]]


def test_distances_grow_from_core_to_node(server: Path):
    topology = probe(all_cpus(), root=server)
    near = topology.graph.distance("local/numa0/core0", "local/numa0/core1")
    far = topology.graph.distance("local/numa0/core0", "local/numa1/core2")
    assert near < far
    assert topology.graph.distance("local/numa1", "local/numa1/gpu0") < topology.graph.distance(
        "local/numa0", "local/numa1/gpu0"
    )


def test_limits_of_the_cgroup_bound_what_there_is(server: Path):
    put(
        server,
        {
            "proc/self/cgroup": "0::/pod/worker",
            "sys/fs/cgroup/pod/worker/memory.max": "max",
            "sys/fs/cgroup/pod/worker/cpu.max": "150000 100000",
            "sys/fs/cgroup/pod/memory.max": str(4 * 2**30),
            "sys/fs/cgroup/pod/memory.current": str(1 * 2**30),
        },
    )
    (node,) = probe(all_cpus(), root=server).nodes
    assert (node.cpu_limit, node.num_cores) == (1.5, 1)
    assert all(domain.free_bytes == 3 * 2**30 for domain in node.domains)


def test_limits_of_the_older_cgroups_count_too(server: Path):
    put(
        server,
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * 2**30),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
        },
    )
    (node,) = probe(all_cpus(), root=server).nodes
    assert node.cpu_limit is None
    assert all(domain.free_bytes == 2 * 2**30 for domain in node.domains)


def test_a_machine_that_tells_nothing_is_one_domain_of_single_cores(tmp_path: Path):
    (node,) = probe(all_cpus(3), root=tmp_path).nodes
    assert [core.cpus for core in node.domains[0].cores] == [(0,), (1,), (2,)]
    assert node.domains[0].memory_bytes == 0


def test_unknown_places_are_named():
    graph = Graph(["a", "b", "alone"], [Link("a", "b", 2.0)])
    assert graph.distance("a", "b") == 2.0
    assert graph.distance("a", "alone") == float("inf")
    with pytest.raises(InvalidInput, match="'c'"):
        graph.distance("a", "c")


def test_no_machine_is_a_topology_too():
    assert Topology(()).graph.places == ("network",)
