"""Veths by our own messages to the kernel: as `ip` would have made them, whole or not at all."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from sandbox_internet import wait_until

from sandbox.egress import links, namespaces, rtnetlink
from sandbox.egress.trunk import NEXT_HOPS, Trunk
from sandbox.errors import CapacityError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")

HOST, INNER = "02:64:6b:79:00:01", "02:64:6b:79:00:02"


@pytest.fixture
def make_namespace() -> Iterator[Callable[[], int]]:
    made: list[int] = []

    def make() -> int:
        made.append(namespaces.new_namespace())
        return made[-1]

    yield make
    for each in made:
        os.close(each)


@pytest.fixture
def trunk(make_namespace: Callable[[], int]) -> Iterator[Trunk]:
    uplink = make_namespace()
    namespaces.configure(uplink, ["link set lo up"])
    made = Trunk(uplink, "test", lambda _: None)
    yield made
    made.close()
    assert links.host_ends(uplink) == ()
    assert [name for _, name in namespaces.run_in(uplink, socket.if_nameindex)] == ["lo"]


def seen(namespace: int, *words: str) -> list[dict[str, Any]]:
    """What `ip -json` shows there, less what differs between any two, or from one moment to the next."""
    command = ["ip", "-json", *words]
    shown = json.loads(namespaces.run_in(namespace, lambda: subprocess.check_output(command)) or "[]")
    for each in shown:
        for name in (
            "ifindex",
            "link_index",
            "link_netnsid",
            "txqlen",
            "ifalias",
            "ifname",
            "dev",
            "operstate",
        ):
            each.pop(name, None)
    return shown


def everything(namespace: int) -> list[list[dict[str, Any]]]:
    return [
        seen(namespace, *words.split())
        for words in (
            "-details addr",
            "-4 route",
            "-6 route",
            "-4 neigh",
            "-6 neigh",
            "-6 route show table local",
        )
    ]


def by_ip(uplink: int, inner: int, far: int, address: str, sixth: str) -> None:
    """A trunk, and a link behind it."""
    queues = "numtxqueues 1 numrxqueues 1"

    def outside() -> None:
        peer = f"peer name trunk address {INNER} {queues} netns /proc/self/fd/{far}"
        batch = f"link set lo up\nlink add dkytrunk address {HOST} {queues} type veth {peer}\n"
        batch += "link set dkytrunk addrgenmode none\nlink set dkytrunk up\n"
        batch += f"neigh replace {NEXT_HOPS[1]} lladdr {INNER} dev dkytrunk nud permanent\n"
        block = ip_network(f"{sixth}/122", strict=False)
        batch += f"route add {block} via {NEXT_HOPS[1]} dev dkytrunk onlink\n"
        peer = f"peer name eth0 address {INNER} {queues} netns /proc/self/fd/{inner}"
        batch += f"link add dkyip address {HOST} {queues} type veth {peer}\n"
        subprocess.run(["ip", "-batch", "-"], input=batch.encode(), check=True, pass_fds=(far, inner))
        Path("/proc/sys/net/ipv6/conf/dkyip/disable_ipv6").write_text("1")
        batch = f"link set dkyip up\nroute add {address} dev dkyip\n"
        batch += f"neigh replace {address} lladdr {INNER} dev dkyip nud permanent\n"
        subprocess.run(["ip", "-batch", "-"], input=batch.encode(), check=True)

    namespaces.run_in(uplink, outside)
    namespaces.configure(far, ["link set trunk up"])
    for name in ("default", "eth0"):
        place = Path(f"/proc/sys/net/ipv6/conf/{name}/accept_ra")
        namespaces.run_in(inner, lambda place=place: place.write_text("0"))
    lines = ["link set lo up", "link set eth0 addrgenmode none", "link set eth0 up"]
    lines += [f"addr add {address}/32 dev eth0", f"addr add {sixth}/128 dev eth0 nodad"]
    for hop in NEXT_HOPS:
        lines.append(f"neigh replace {hop} lladdr {HOST} dev eth0 nud permanent")
        lines.append(f"route add default via {hop} dev eth0 onlink")
    namespaces.configure(inner, lines)


def test_a_link_is_as_ip_makes_it(make_namespace: Callable[[], int], trunk: Trunk) -> None:
    theirs, inner, far = make_namespace(), make_namespace(), make_namespace()
    link = links.make_link(trunk, lambda _: None)
    by_ip(theirs, inner, far, *link.home.addresses)
    wait_until(lambda: everything(trunk.uplink) == everything(theirs))  # once all carry
    assert everything(link.namespace) == everything(inner)
    ends = {each.name: each for each in links.host_ends(trunk.uplink)}
    assert len(ends) == 2
    assert (ends[link.name].state, ends[link.name].owner.pid) == ("test", os.getpid())
    links.remove_link(trunk, link)
    assert len(links.host_ends(trunk.uplink)) == 1
    links.remove_link(trunk, link)  # again


def test_the_kernel_has_no_route_of_version_6_more_for_each_link(trunk: Trunk) -> None:
    """At each that begins to carry, and at each that goes, it goes through those of all."""
    words = ["ip", "-6", "-json", "route", "show", "table", "all"]

    def routes() -> list[dict[str, Any]]:
        return json.loads(namespaces.run_in(trunk.uplink, lambda: subprocess.check_output(words)))

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(links.make_link, trunk, lambda _: None) for _ in range(20)]
        made = [each.result() for each in waiting]
    assert len({each.home.number for each in made}) == 20
    devices = {name for _, name in namespaces.run_in(trunk.uplink, socket.if_nameindex)}
    assert {each["dev"] for each in routes()} <= devices - {each.name for each in made}
    for each in made:
        links.remove_link(trunk, each)


def test_addresses_are_given_again_once_and_the_one_of_before_last(trunk: Trunk) -> None:
    first, second = trunk.take(), trunk.take()
    trunk.give_back(first)
    trunk.give_back(first)  # again
    later = [trunk.take() for _ in range(300)]
    numbers = [second.number, *(each.number for each in later)]
    assert len(set(numbers)) == len(numbers)
    assert first.number in numbers
    assert later[0].number != first.number


def test_a_block_that_another_owner_has_is_found(trunk: Trunk) -> None:
    other = Trunk(trunk.uplink, "other", lambda _: None)
    try:
        assert len({trunk.take().number for _ in range((1 << 16) - 1)}) == (1 << 16) - 1
        with pytest.raises(CapacityError, match="no free block"):
            trunk.take()
        with pytest.raises(CapacityError, match="no free block"):
            other.take()
        trunk.close()
        assert other.take().number  # the routes went with it
    finally:
        other.close()


def test_an_order_that_the_kernel_refuses_is_named_and_the_rest_done(
    make_namespace: Callable[[], int],
) -> None:
    def ask() -> str:
        loopback = socket.if_nametoindex("lo")
        orders = [rtnetlink.add_default_route(4242, "198.18.0.1"), rtnetlink.up(loopback)]
        with pytest.raises(OSError, match=r"add default route via 198\.18\.0\.1: No such device"):
            rtnetlink.carry_out(orders)
        return subprocess.check_output(["ip", "-brief", "link", "show", "lo"], text=True)

    assert "UP" in namespaces.run_in(make_namespace(), ask)


def test_a_machine_that_has_version_6_turned_off_has_links_all_the_same(
    make_namespace: Callable[[], int],
) -> None:
    """As most containers have it."""

    def turn_off() -> None:
        for name in ("all", "default"):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    uplink = make_namespace()
    namespaces.configure(uplink, ["link set lo up"])
    namespaces.run_in(uplink, turn_off)
    trunk = Trunk(uplink, "test", lambda _: None)
    links.remove_link(trunk, links.make_link(trunk, lambda _: None))
    trunk.close()


def test_each_of_many_threads_hears_of_its_own_orders(trunk: Trunk) -> None:
    """Over one socket."""
    made = [links.make_link(trunk, lambda _: None) for _ in range(8)]

    def refused(number: int) -> bool:
        orders = [rtnetlink.up(made[number % 8].ifindex), rtnetlink.up(90_000 + number)]
        with pytest.raises(OSError, match=f"link {90_000 + number} up: No such device"):
            trunk._routing.carry_out([*orders, orders[0]])
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(refused, range(400)))
        assert list(threads.map(lambda each: links.remove_link(trunk, each), [*made, *made])) == [None] * 16
    assert trunk._routing._answers == {}
    assert len(links.host_ends(trunk.uplink)) == 1


def test_what_a_watcher_raises_leaves_no_link(trunk: Trunk) -> None:
    def refuse(_: int) -> None:
        raise OSError(12, "no memory for a program")

    with pytest.raises(OSError, match="no memory"):
        links.make_link(trunk, refuse)
    assert len(links.host_ends(trunk.uplink)) == 1  # its own
    with pytest.raises(OSError, match="no memory"):
        Trunk(trunk.uplink, "test", refuse)
    assert len(links.host_ends(trunk.uplink)) == 1
