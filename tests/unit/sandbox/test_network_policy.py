"""The network part of a policy: what it takes, and what it says of the rest."""

import pytest
from pydantic import ValidationError

from sandbox import Policy
from sandbox.errors import InvalidArgument
from sandbox.policy import Destination, Names, Network, presets
from sandbox.policy.document import read_policy
from sandbox.policy.network import known_services


def test_the_default_is_no_network():
    assert Policy().network == "none"
    assert Network().destinations == Network().names == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"to": "10.0.0.1/8", "ports": [80]}, "to"),
        ({"to": "example.org", "ports": [80]}, "to"),
        ({"to": "10.0.0.1", "ports": []}, "ports"),
        ({"to": "10.0.0.1", "ports": [0]}, "ports"),
        ({"to": "10.0.0.1", "ports": [65536]}, "ports"),
        ({"to": "10.0.0.1", "ports": ["9-8"]}, "ports"),
        ({"to": "10.0.0.1", "ports": ["http"]}, "ports"),
        ({"to": "10.0.0.1", "ports": [80], "protocol": "icmp"}, "protocol"),
        ({"to": "10.0.0.1", "ports": [80], "port": 80}, "port"),
    ],
)
def test_a_bad_destination_names_its_field(fields: dict[str, object], named: str):
    with pytest.raises(ValidationError) as caught:
        Destination.model_validate(fields)
    assert named in {str(each["loc"][0]) for each in caught.value.errors()}


@pytest.mark.parametrize(
    "domain", ["", "org", "*.org", "*", "a..b", "-a.org", "1.2.3.4", "bücher.de", "a.*.org"]
)
def test_domains_are_names_below_a_top_level(domain: str):
    if domain == "*":
        assert Names(domains=(domain,), ports=(443,)).domains == ("*",)
        return
    with pytest.raises(InvalidArgument, match="domains"):
        Names(domains=(domain,), ports=(443,))


def test_domains_are_kept_in_lower_case_without_the_final_dot():
    assert Names(domains=("Example.ORG.",), ports=(443,)).domains == ("example.org",)


def test_ports_may_be_ranges():
    destination = Destination(to="10.0.0.1", ports=(80, "8000-8010", "443"))
    assert list(destination.ranges()) == [(80, 80), (8000, 8010), (443, 443)]


def test_services_are_those_of_the_file():
    assert {"pypi", "npm", "debian", "crates", "go"} <= set(known_services())
    assert Network(services=("pypi",)).all_names() == (known_services()["pypi"],)
    with pytest.raises(InvalidArgument, match=r"^services=\('pipy',\): 'pipy' is unknown; use crates"):
        Network(services=("pipy",))


def test_presets():
    assert presets.preset("offline").network == presets.preset("grader").network == "none"
    index = presets.preset("package-index-only").network
    assert isinstance(index, Network)
    assert index.destinations == ()
    opened = presets.preset("open").network
    assert isinstance(opened, Network)
    assert {str(each.to) for each in opened.destinations} == {"0.0.0.0/0", "::/0"}
    for gateway, to in (("10.0.0.5:8000", "10.0.0.5/32"), ("[fd00::5]:8000", "fd00::5/128")):
        agent = presets.preset("agent", gateway=gateway).network
        assert isinstance(agent, Network)
        assert [(str(each.to), each.ports) for each in agent.destinations] == [(to, ("8000",))]
        assert agent.all_names() == ()


def test_presets_say_what_they_lack():
    for name, gateway in (
        ("agent", None),
        ("agent", "10.0.0.5"),
        ("offline", "10.0.0.5:1"),
        ("closed", None),
    ):
        with pytest.raises(InvalidArgument, match=r"gateway|preset='closed'"):
            presets.preset(name, gateway=gateway)


DEAD_ENDS = (
    *("127.0.0.1", "127.0.0.0/8", "0.0.0.0", "169.254.169.254", "100.100.100.200", "224.0.0.1", "198.18.0.9"),
    *("224.0.0.0/3", "::ffff:224.0.0.0/99", "64:ff9b::e000:0/99"),  # each of two denied halves
    *("::1", "::", "fe80::1", "ff02::1", "fd6b:79d0:5bc1::9", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
)


@pytest.mark.parametrize("to", DEAD_ENDS)
def test_where_no_policy_leads_is_refused_where_it_is_written(to: str):
    with pytest.raises(InvalidArgument, match=f"^to='{to}': .*dockyard serve --host ADDRESS"):
        Destination(to=to, ports=(8000,))
    with pytest.raises(InvalidArgument, match=r"network\.destinations\.0\.to="):
        read_policy(f'{{"network": {{"destinations": [{{"to": "{to}", "ports": [80]}}]}}}}')
    if "/" not in to:
        gateway = f"[{to}]:8000" if ":" in to else f"{to}:8000"
        with pytest.raises(InvalidArgument, match=r"^gateway=.*(loopback is its own|no policy)") as caught:
            presets.agent(gateway)
        assert "dockyard serve --host ADDRESS" in caught.value.hint


@pytest.mark.parametrize(
    "to", ["0.0.0.0/0", "::/0", "169.254.0.0/15", "126.0.0.0/7", "192.0.0.0/2", "::ffff:0:0/96", "10.0.0.5"]
)
def test_wider_rules_and_private_ranges_are_not(to: str):
    assert Destination(to=to, ports=(8000,)).ports == (8000,)


@pytest.mark.parametrize(
    "to", ["2001:db8::1%eth0", "fe80::1%eth0", "::ffff:10.0.0.5%lo", "2001:db8::%eth0/64"]
)
def test_a_link_of_this_machine_means_nothing_in_a_sandbox(to: str):
    with pytest.raises(InvalidArgument, match="leave out the %"):
        Destination(to=to, ports=(80,))


def test_a_policy_survives_json():
    for each in (presets.open_internet(), presets.package_index_only(), presets.agent("10.0.0.5:8000")):
        assert Policy.model_validate_json(each.model_dump_json()) == each
    assert Destination(to="203.0.113.7", ports=(80,)).to == "203.0.113.7/32"


def test_a_later_phase_needs_the_network_from_the_start():
    web = Network(destinations=(Destination(to="203.0.113.7", ports=(80,)),))
    assert Policy().first_network is None
    assert Policy(phases={"work": "none"}).first_network is None
    assert Policy(network=web, phases={"work": "none"}).first_network == web
    assert Policy(phases={"install": web}).first_network == Network()
