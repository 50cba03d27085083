"""What machines are made of: nodes, their NUMA domains, and cores, memory and devices in these.

Frozen values; `probe` reads them from this machine. `Topology.graph` is the same as a graph, whose
distances tell what is close to what.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from placement.graph import Graph, Link

# Ratios of distances are what counts: within a domain, between the domains of a node, between nodes.
_TO_DOMAIN, _TO_NODE, _TO_NETWORK = 1.0, 10.0, 100.0
_GIB = 2**30

DeviceKind = Literal["gpu", "nic", "nvme"]


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core; `cpus` are its hardware threads that this process may use."""

    id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device; `memory_bytes` is 0 where the kernel does not tell."""

    name: str
    kind: DeviceKind
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Domain:
    """A NUMA domain: cores, and the memory and devices next to them."""

    id: int
    cores: tuple[Core, ...]
    memory_bytes: int
    free_bytes: int  # what can be had now without swapping
    devices: tuple[Device, ...] = ()

    def devices_of(self, kind: DeviceKind) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == kind)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `cpu_limit` is the quota of its cgroup in cores, None where there is none."""

    name: str
    domains: tuple[Domain, ...]
    cpu_limit: float | None = None

    @property
    def num_cores(self) -> int:
        """Cores that may be busy at the same time: those there are, or fewer by the quota."""
        cores = sum(len(domain.cores) for domain in self.domains)
        return cores if self.cpu_limit is None else max(1, min(cores, int(self.cpu_limit)))


@dataclass(frozen=True)
class Topology:
    """All machines that things can be placed on."""

    nodes: tuple[Node, ...]

    def domains(self) -> Iterator[tuple[Node, Domain, str]]:
        """Every domain with its node and its place in the graph."""
        for node in self.nodes:
            for domain in node.domains:
                yield node, domain, domain_place(node, domain)

    @cached_property
    def graph(self) -> Graph:
        """Places `network`, `NODE`, `NODE/numaN`, `NODE/numaN/coreM` and `NODE/numaN/DEVICE`, linked."""
        places, links = ["network"], list[Link]()
        for node in self.nodes:
            places.append(node.name)
            links.append(Link("network", node.name, _TO_NETWORK))
        for node, domain, place in self.domains():
            links.append(Link(node.name, place, _TO_NODE))
            names = [f"core{core.id}" for core in domain.cores] + [device.name for device in domain.devices]
            links += [Link(place, f"{place}/{name}", _TO_DOMAIN) for name in names]
        return Graph(places, links)

    def describe(self) -> str:
        """A few lines for people: what is where."""
        lines: list[str] = []
        for node in self.nodes:
            quota = f", quota {node.cpu_limit:g}" if node.cpu_limit is not None else ""
            lines.append(f"{node.name}: {node.num_cores} usable cores{quota}")
            lines += [f"  {_describe_domain(domain)}" for domain in node.domains]
        return "\n".join(lines)


def domain_place(node: Node, domain: Domain) -> str:
    """The domain's name in the graph and in every placement."""
    return f"{node.name}/numa{domain.id}"


def gib(amount_bytes: float) -> str:
    """Bytes for people."""
    return (
        f"{amount_bytes / _GIB:.1f} GiB" if amount_bytes >= _GIB / 10 else f"{amount_bytes / 2**20:.0f} MiB"
    )


def _describe_domain(domain: Domain) -> str:
    cores = ", ".join(f"{core.id} (cpu {'+'.join(map(str, core.cpus))})" for core in domain.cores)
    devices = f"; devices {', '.join(device.name for device in domain.devices)}" if domain.devices else ""
    memory = f"{gib(domain.free_bytes)} free of {gib(domain.memory_bytes)}"
    return f"numa{domain.id}: cores {cores or 'none'}; memory {memory}{devices}"
