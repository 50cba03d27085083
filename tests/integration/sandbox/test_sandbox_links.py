"""Veths by our own messages to the kernel: as `ip` would have made them, whole or not at all."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sandbox_internet import wait_until

from sandbox.egress import links, rtnetlink
from sandbox.egress.service import Egress

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")

HOST, INNER = "02:64:6b:79:00:01", "02:64:6b:79:00:02"
OWN = ("198.18.0.9", "fd6b:79d0:5bc1::9")


@pytest.fixture
def namespaces() -> Iterator[Callable[[], int]]:
    made: list[int] = []

    def make() -> int:
        made.append(links.new_namespace())
        return made[-1]

    yield make
    for each in made:
        os.close(each)


def seen(namespace: int, *words: str) -> list[dict[str, Any]]:
    """What `ip -json` shows there, less what differs between any two, or from one moment to the next."""
    command = ["ip", "-json", *words]
    shown = json.loads(links.run_in(namespace, lambda: subprocess.check_output(command)) or "[]")
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


def by_ip(uplink: int, inner: int) -> None:
    def outside() -> None:
        peer = f"peer name eth0 address {INNER} numtxqueues 1 numrxqueues 1 netns /proc/self/fd/{inner}"
        batch = f"link add dkyip address {HOST} numtxqueues 1 numrxqueues 1 type veth {peer}\n"
        batch += "link set dkyip addrgenmode none\nlink set dkyip up\n"
        for address in OWN:
            batch += f"route add {address} dev dkyip\n"
            batch += f"neigh replace {address} lladdr {INNER} dev dkyip nud permanent\n"
        subprocess.run(["ip", "-batch", "-"], input=batch.encode(), check=True, pass_fds=(inner,))

    links.run_in(uplink, outside)
    for name in ("default", "eth0"):
        place = Path(f"/proc/sys/net/ipv6/conf/{name}/accept_ra")
        links.run_in(inner, lambda place=place: place.write_text("0"))
    lines = ["link set lo up", "link set eth0 addrgenmode none", "link set eth0 up"]
    lines += [f"addr add {OWN[0]}/32 dev eth0", f"addr add {OWN[1]}/128 dev eth0 nodad"]
    for hop in links.NEXT_HOPS:
        lines.append(f"neigh replace {hop} lladdr {HOST} dev eth0 nud permanent")
        lines.append(f"route add default via {hop} dev eth0 onlink")
    links.configure(inner, lines)


def by_us(monkeypatch: pytest.MonkeyPatch, uplink: int, number: int = 9) -> links.Link:
    monkeypatch.setattr(links.secrets, "randbelow", lambda _: number - 1)
    return links.make_link(uplink, "test", lambda _: None)


def test_a_link_is_as_ip_makes_it(namespaces: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, inner, ours = namespaces(), namespaces(), namespaces()
    by_ip(theirs, inner)
    link = by_us(monkeypatch, ours)
    try:
        wait_until(lambda: everything(ours) == everything(theirs))  # once both carry
        assert everything(link.namespace) == everything(inner)
        (host_end,) = links.host_ends(ours)
        assert (host_end.name, host_end.state, host_end.owner.pid) == (link.name, "test", os.getpid())
    finally:
        links.remove_link(ours, link)
    assert links.host_ends(ours) == ()
    links.remove_link(ours, link)  # again


def groups_behind(uplink: int) -> set[str]:
    """The host ends that have a route to all groups (multicast) of version 6."""
    words = ["ip", "-6", "-json", "route", "show", "table", "local", "ff00::/8"]
    done = links.run_in(uplink, lambda: subprocess.run(words, capture_output=True, text=True, check=True))
    return {each["dev"] for each in json.loads(done.stdout or "[]")}


def test_a_route_to_groups_goes_once_it_is_there(namespaces: Callable[[], int]) -> None:
    uplink = namespaces()
    early: list[bool] = []
    link = links.make_link(uplink, "test", lambda ifindex: early.append(links.remove_groups(ifindex)))
    assert early == [False]
    wait_until(lambda: groups_behind(uplink) == {link.name})  # once it carries
    assert links.run_in(uplink, lambda: links.remove_groups(link.ifindex))
    assert groups_behind(uplink) == set()
    links.remove_link(uplink, link)
    assert links.run_in(uplink, lambda: links.remove_groups(link.ifindex))  # it is gone with it


def test_routes_to_groups_go_however_many_make_links(namespaces: Callable[[], int], tmp_path: Path) -> None:
    """At each that comes up, the kernel goes through those of all."""
    uplink = namespaces()
    place = Path(f"/proc/self/fd/{uplink}")
    egress = Egress(tmp_path, uplink=place, nameserver=("198.51.100.53", 53), num_spare=0)
    try:
        with ThreadPoolExecutor(4) as threads:
            made = [each.result() for each in [threads.submit(egress._make_link) for _ in range(20)]]

        def has_only_its_own() -> bool:
            made.append(egress._make_link())
            return groups_behind(uplink) <= {made[-1].name}

        wait_until(has_only_its_own)  # once they all carry
    finally:
        egress.close()
    for each in made:
        links.remove_link(uplink, each)


def test_an_address_that_is_taken_is_found_and_nothing_is_left(
    namespaces: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    uplink = namespaces()
    link = by_us(monkeypatch, uplink)
    with pytest.raises(links.CapacityError, match="no free address"):
        by_us(monkeypatch, uplink)
    assert [each.name for each in links.host_ends(uplink)] == [link.name]
    links.remove_link(uplink, link)


def test_an_order_that_the_kernel_refuses_is_named_and_the_rest_done(namespaces: Callable[[], int]) -> None:
    def ask() -> str:
        loopback = socket.if_nametoindex("lo")
        orders = [rtnetlink.add_route(4242, "198.18.0.1"), rtnetlink.up(loopback)]
        with pytest.raises(OSError, match=r"add route to 198\.18\.0\.1: No such device"):
            rtnetlink.carry_out(orders)
        return subprocess.check_output(["ip", "-brief", "link", "show", "lo"], text=True)

    assert "UP" in links.run_in(namespaces(), ask)


def test_what_a_watcher_raises_leaves_no_link(namespaces: Callable[[], int]) -> None:
    def refuse(_: int) -> None:
        raise OSError(12, "no memory for a program")

    uplink = namespaces()
    with pytest.raises(OSError, match="no memory"):
        links.make_link(uplink, "test", refuse)
    assert links.host_ends(uplink) == ()
