"""A routed veth as anybody would make one, without a program of ours: what sandboxes' are compared with."""

import os

from sandbox.egress import namespaces
from sandbox.egress.trunk import HOST_MAC, INNER_MAC, NEXT_HOPS

NAME = "plain"
_ADDRESSES = {"192.0.2.1": "/32", "fd00:db8::1": "/128 nodad"}
_QUEUES = "numtxqueues 1 numrxqueues 1"


def make(uplink: int, inner: int) -> None:
    """Between two network namespaces, descriptors: `plain` in the one, `eth0` in the other, with queues,
    addresses and neighbours by hand as those of ours. It goes with either namespace."""
    peer = f"peer name eth0 address {INNER_MAC} {_QUEUES} netns /proc/{os.getpid()}/fd/{inner}"
    lines = [f"link add {NAME} address {HOST_MAC} {_QUEUES} type veth {peer}", f"link set {NAME} up"]
    for address in _ADDRESSES:
        lines.append(f"route add {address} dev {NAME}")
        lines.append(f"neigh replace {address} lladdr {INNER_MAC} dev {NAME} nud permanent")
    namespaces.configure(uplink, lines)
    lines = ["link set lo up", "link set eth0 addrgenmode none", "link set eth0 up"]
    lines += [f"address add {address}{rest} dev eth0" for address, rest in _ADDRESSES.items()]
    for hop in NEXT_HOPS:
        lines.append(f"neigh replace {hop} lladdr {HOST_MAC} dev eth0 nud permanent")
        lines.append(f"route add default via {hop} dev eth0 onlink")
    namespaces.configure(inner, lines)
