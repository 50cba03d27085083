"""Policies as entries of longest-prefix maps: the entry that the kernel finds has what the rules say."""

from contextlib import nullcontext
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.egress import rules
from sandbox.egress.connection import matches
from sandbox.egress.rules import (
    FOREVER,
    PRIVATE,
    Ports,
    Prefix,
    Rule,
    compile_table,
    prefix_of,
    reaches,
)
from sandbox.errors import InvalidArgument
from sandbox.policy import Destination, Network
from sandbox.privileged.denials import NOWHERE

PLACES = (
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.2.0/24",
    "10.1.2.3/32",
    "203.0.113.0/24",
    "203.0.113.7/32",
)
PLACES_6 = (
    "::/0",
    "2000::/3",
    "2001:db8::/32",
    "2001:db8::7/128",
    "fd00::/8",
    "fd00::7/128",
    "64:ff9b::cb00:7107/128",
)
ADDRESSES = (
    *("10.1.2.3", "10.1.2.4", "10.9.9.9", "203.0.113.7", "203.0.113.8", "8.8.8.8", "192.168.0.1"),
    *(
        "2001:db8::7",
        "2001:db8::8",
        "2a00::1",
        "fd00::7",
        "fd00::8",
        "::ffff:203.0.113.7",
        "64:ff9b::203.0.113.7",
    ),
)

ports = st.builds(
    Ports, st.sampled_from([1, 80, 443]), st.sampled_from([443, 8000]), st.sampled_from([0, 6, 17])
)
some_rules = st.lists(st.builds(Rule, st.sampled_from(PLACES + PLACES_6).map(prefix_of), ports), max_size=7)


@given(st.sampled_from(PLACES + PLACES_6).map(prefix_of), st.lists(ports, max_size=3), some_rules)
def test_what_is_clear_holds_nothing_that_is_denied(place: Prefix, own: list[Ports], denied: list[Rule]):
    denials = rules.Denials(denied)
    touched = [r.ports for r in denied if r.prefix.covers(place) or place.covers(r.prefix)]
    assert sorted(denials.near(place)) == sorted(touched)
    clear = rules.is_clear(place, own, denials)
    for address in map(prefix_of, ADDRESSES):
        for port, protocol in product((1, 80, 200, 443, 8000), (6, 17)):
            both = [own, [rule.ports for rule in denied if rule.prefix.covers(address)]]
            if place.covers(address) and all(
                any(has(each, port, protocol) for each in all_) for all_ in both
            ):
                assert not clear


def has(ranges: Ports, port: int, protocol: int) -> bool:
    return ranges.first <= port <= ranges.last and ranges.protocol in (0, protocol)


def test_most_of_the_world_is_clear():
    node = [Rule(prefix_of(net), rules.EVERY_PORT) for net in NOWHERE]
    node = rules.Denials([*node, Rule(prefix_of("203.0.113.7"), Ports(22, 22, 0))])
    web = [Ports(443, 443, 6)]
    assert rules.is_clear(prefix_of("203.0.113.7"), web, node)
    assert rules.is_clear(prefix_of("2001:db8::/32"), web, node)
    assert not rules.is_clear(prefix_of("203.0.113.0/24"), [Ports(1, 65535, 6)], node)
    assert not rules.is_clear(prefix_of("0.0.0.0/0"), web, node)


def longest(table: rules.Table, address: Prefix) -> tuple[Ports, ...]:
    """What the kernel finds."""
    covering = [prefix for prefix in table if prefix.covers(address)]
    return table[max(covering, key=lambda each: each.length)] if covering else ()


some_own = st.frozensets(st.sampled_from(ADDRESSES).map(prefix_of), max_size=3)


@given(some_rules, st.sampled_from(ADDRESSES).map(prefix_of), some_own)
def test_the_longest_prefix_has_all_that_reaches_an_address(
    written: list[Rule], address: Prefix, own: rules.Own
):
    expected = {rule.ports for rule in written if reaches(rule, address, own)}
    assert set(longest(compile_table(written, own), address)) == expected
    if address in own:
        assert expected == {rule.ports for rule in written if rule.prefix == address}


@given(some_rules, st.sampled_from(ADDRESSES).map(prefix_of))
def test_without_zones_every_covering_rule_counts(written: list[Rule], address: Prefix):
    expected = {rule.ports for rule in written if rule.prefix.covers(address)}
    assert set(longest(compile_table(written, with_zones=False), address)) == expected


def compiled(*nets: str, own: tuple[str, ...] = ()) -> rules.Table:
    """Also of ranges that a policy's own checks refuse."""
    written = (Rule(prefix_of(net), Ports(80, 80, 6)) for net in nets)
    return compile_table(written, rules.own_prefixes(own))


@pytest.mark.parametrize("private", ["10.1.2.3", "127.0.0.1", "169.254.169.254", "192.168.1.1", "198.18.0.9"])
def test_private_ranges_must_be_written(private: str):
    address = prefix_of(private)
    assert longest(compiled("0.0.0.0/0", "::/0"), address) == ()
    assert longest(compiled("0.0.0.0/0", private), address) != ()


@pytest.mark.parametrize("address", ["203.0.113.7", "10.1.2.3", "2001:db8::7"])
def test_own_addresses_must_be_written_one_by_one(address: str):
    wide = ("0.0.0.0/0", "::/0", "203.0.113.0/24", "10.0.0.0/8", "2001:db8::/64")
    place, own = prefix_of(address), (address, "127.0.0.1", "::1", "fe80::1")
    assert longest(compiled(*wide, own=own), place) == ()
    assert longest(compiled(*wide, address, own=own), place) != ()
    assert longest(compiled(*wide), place) != ()
    assert rules.own_prefixes(own) == {place}  # no policy leads to the others anyway


def test_own_ports_that_are_denied_to_all_are_refused():
    own, closed = rules.own_prefixes(["203.0.113.7"]), [(22, 22), (2375, 2380)]

    def check(to: str, *ports: int | str) -> None:
        rules.check_own_ports(Network(destinations=(Destination(to=to, ports=ports),)), own, closed)

    check("203.0.113.7", 22, 80)
    check("203.0.113.7", "22-23")
    check("203.0.113.8", 22)
    with pytest.raises(InvalidArgument, match=r"destinations\.0: port 22, 2376-2377 of 203\.0\.113\.7/32"):
        check("203.0.113.7", 22, "2376-2377")


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)).map(sorted),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)).map(sorted), max_size=4),
)
def test_own_ports_are_refused_where_all_of_them_are_denied(ports: list[int], closed: list[list[int]]):
    """By whichever ranges together."""
    written = Network(destinations=(Destination(to="203.0.113.7", ports=(f"{ports[0]}-{ports[1]}",)),))
    denied = {port for low, high in closed for port in range(low, high + 1)}
    refused = (
        pytest.raises(InvalidArgument) if denied >= set(range(ports[0], ports[1] + 1)) else nullcontext()
    )
    with refused:
        own = rules.own_prefixes(["203.0.113.7"])
        rules.check_own_ports(written, own, ((low, high) for low, high in closed))


def test_all_of_version_6_has_no_version_4_in_it():
    assert longest(compiled("::/0"), prefix_of("203.0.113.7")) == ()
    assert longest(compiled("::/0"), prefix_of("2a00::1")) != ()
    assert longest(compiled("::/0"), prefix_of("fd00::1")) == ()


def test_forms_of_one_address_are_one_prefix():
    forms = ("203.0.113.7", "::ffff:203.0.113.7", "64:ff9b::203.0.113.7")
    assert len({prefix_of(form) for form in forms}) == 1
    assert rules.address_text(prefix_of(forms[0]).packed()) == "203.0.113.7"
    assert rules.address_text(prefix_of("2001:db8::7").packed()) == "2001:db8::7"


def test_no_name_leads_to_private_addresses_or_nowhere():
    for net in NOWHERE[:5]:
        assert any(zone.covers(prefix_of(net)) for zone in PRIVATE)
    for address in ("10.0.0.1", "::1", "fd00::1", "64:ff9b::10.0.0.1", "::ffff:127.0.0.1", "2002:a00:1::"):
        assert rules.is_private(prefix_of(address))
    assert not rules.is_private(prefix_of("203.0.113.7"))


def test_the_later_of_two_ends_holds():
    place = prefix_of("203.0.113.7")
    ends = [Rule(place, Ports(443, 443, 6, until)) for until in (5, 9, 7)]
    assert compile_table(ends)[place] == (Ports(443, 443, 6, 9),)
    assert compile_table([*ends, Rule(place, Ports(443, 443, 6))])[place] == (Ports(443, 443, 6, FOREVER),)


def test_more_ranges_than_an_entry_holds_are_refused():
    place = prefix_of("203.0.113.7")
    with pytest.raises(InvalidArgument, match=r"9 ranges of ports meet at 203\.0\.113\.7"):
        compile_table(Rule(place, Ports(port, port, 6)) for port in range(1, 10))


def test_keys_and_entries_are_as_the_programs_read_them():
    place = prefix_of("203.0.113.0/24")
    key = rules.pack_allow_key(0x1122334455667788, 7, place)
    assert len(key) == 4 + 8 + 4 + 16
    assert key[:4] == (96 + 96 + 24).to_bytes(4, "little")
    assert key[16:] == bytes(10) + b"\xff\xff\xcb\x00\x71\x00"
    assert rules.pack_deny_key(place) == (96 + 24).to_bytes(4, "little") + key[16:]
    entry = rules.pack_entry((Ports(80, 81, 6, 5),))
    assert len(entry) == 8 + 8 * 16
    assert entry[:22] == bytes([1, *[0] * 7, 5, *[0] * 7, 80, 0, 81, 0, 6, 0])


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("example.org", "example.org", True),
        ("example.org", "www.example.org", False),
        ("example.org", "evil-example.org", False),
        ("example.org", "example.org.evil.com", False),
        ("*.example.org", "www.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", ".example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("*", "anything.at.all", True),
    ],
)
def test_a_domain_is_itself_or_what_is_below_it(pattern: str, name: str, expected: bool):
    assert matches(pattern, name) is expected
