"""Names in a networked sandbox: ours is the only resolver, and it asks for what the policy allows."""

import pytest
from sandbox_internet import HOST, HOST_6, NAMESERVER, OTHER, OWN, PRIVATE, Internet, wait_until

from protocol.clock import SystemClock
from sandbox.egress import namespaces
from sandbox.egress.resolver import BURST
from sandbox.egress.service import Egress, first_nameserver
from sandbox.policy import Network, Policy

WEB = {"domains": ["example.org", "*.cdn.net"], "ports": [80]}
REACH = """
import errno, socket, sys
for host in sys.argv[1:]:
    name, _, port = host.partition(":")
    try:
        with socket.create_connection((name, int(port or 80)), timeout=5) as one:
            print(one.recv(5).decode())
    except socket.gaierror as error:
        print("unknown")
    except OSError as error:
        print(errno.errorcode.get(error.errno, error))
"""


def reach(box, *hosts):
    result = box.commands.run(["python3", "-c", REACH, *hosts], timeout_s=60)
    assert result.ok, result.stderr
    return result.stdout.split()


def test_allowed_names_resolve_and_their_addresses_open(connect, internet, substrate):
    internet.names = {"example.org": [HOST], "a.b.cdn.net": [HOST_6], "cdn.net": [HOST]}
    box = connect(names=(WEB,), substrate=substrate)
    assert reach(box, HOST, "example.org", "EXAMPLE.org", "a.b.cdn.net") == ["EPERM"] + ["hello"] * 3
    assert reach(box, HOST, "example.org:81", "cdn.net") == ["hello", "EPERM", "unknown"]


def test_other_names_are_never_asked_for(connect, internet):
    others = ("secret.example.org", "evil-example.org", "example.org.evil.com", "xcdn.net")
    internet.names = {name: [HOST] for name in others}
    box = connect(names=(WEB,))
    assert reach(box, *internet.names) == ["unknown"] * 4
    assert internet.asked == []
    refused = {each.address for each in box.denials if each.protocol == "dns"}
    assert refused == set(internet.names)


def test_without_a_rule_for_names_nothing_resolves(connect, internet):
    internet.names = {"example.org": [HOST]}
    assert reach(connect({"to": HOST, "ports": [80]}), "example.org", HOST) == ["unknown", "hello"]
    assert internet.asked == []


@pytest.mark.parametrize("address", [PRIVATE, "127.0.0.1", "169.254.169.254", "fd00::1", "64:ff9b::10.0.0.1"])
def test_answers_in_private_ranges_are_refused(connect, internet, address):
    """Rebinding: the name is allowed, what it says is not; one bad address spoils the answer."""
    internet.names = {"example.org": [HOST, address], "a.cdn.net": [address]}
    box = connect(names=(WEB,))
    kinds = "socket.AF_INET6" if ":" in address else "socket.AF_INET"
    for name in internet.names:
        result = box.commands.run(
            ["python3", "-c", f"import socket; print(socket.getaddrinfo('{name}', 80, {kinds}))"]
        )
        assert not result.ok
        assert [each.detail for each in result.denials if "private" in each.detail] != []
    assert reach(box, PRIVATE, "169.254.169.254") == ["EPERM"] * 2


def test_no_name_leads_to_the_machines_own_addresses(connect, internet):
    internet.names = {"example.org": [OWN], "a.cdn.net": [HOST, OWN], "b.cdn.net": [HOST]}
    box = connect(names=(WEB,))
    assert reach(box, "example.org", "a.cdn.net", OWN, "b.cdn.net") == [*["unknown"] * 2, "EPERM", "hello"]
    assert [each.address for each in box.denials if "own address" in each.detail] == [
        "example.org",
        "a.cdn.net",
    ]


def test_a_names_address_that_becomes_the_machines_own_is_shut(create, state_dir, internet):
    """Learnt addresses are looked through again, too."""
    world = Internet()
    egress = Egress(state_dir, uplink=world.path, nameserver=NAMESERVER, num_spare=0)
    try:
        world.names = {"example.org": [OTHER], "a.cdn.net": [HOST]}
        policy = Policy.model_validate({"network": {"names": [WEB]}})
        with create(policy=policy, egress=egress) as box:
            assert reach(box, "example.org", "a.cdn.net") == ["hello", "hello"]
            namespaces.configure(world.namespace, [f"address add {OTHER}/32 dev lo"])
            wait_until(lambda: reach(box, OTHER) == ["EPERM"])
            assert reach(box, HOST, "example.org") == ["hello", "unknown"]
    finally:
        egress.close()
        world.close()


def test_an_answer_holds_for_its_time(create, connect, internet, state_dir):
    """By a clock that is so far behind the kernel's that every answer is over when it comes."""

    class Late(SystemClock):
        def now_ns(self):
            return super().now_ns() // 1000

    internet.names = {"example.org": [HOST]}
    late = Egress(state_dir, uplink=internet.path, nameserver=NAMESERVER, num_spare=0, clock=Late())
    try:
        box = connect(names=(WEB,), egress=late)
        assert reach(box, "example.org") == ["EPERM"]
        box.kill()
    finally:
        late.close()


def test_an_update_keeps_the_addresses_of_names_that_stay(connect, internet):
    internet.names = {"example.org": [HOST], "a.cdn.net": [OTHER]}
    box = connect(names=(WEB,))
    assert reach(box, "example.org", "a.cdn.net") == ["hello"] * 2
    box.set_network(
        Network.model_validate({"names": [{"domains": ["example.org"], "ports": [80]}]}), expected_version=1
    )
    assert reach(box, HOST, OTHER, "a.cdn.net") == ["hello", "EPERM", "unknown"]


def test_an_address_of_two_names_is_open_for_both(connect, internet):
    internet.names = {"example.org": [HOST], "a.cdn.net": [HOST]}
    other = {"domains": ["*.cdn.net"], "ports": [81]}
    box = connect(names=({**WEB, "domains": ["example.org"]}, other))
    assert reach(box, "a.cdn.net:81", "example.org:80", f"{HOST}:80", f"{HOST}:81") == ["hello"] * 4


def test_other_kinds_of_records_are_empty_and_not_asked_for(connect, internet):
    """Text records of a name carry anything."""
    script = """
import socket, struct
for kind in (16, 255, 65):
    name = b"".join(bytes([len(part)]) + part for part in (b"example", b"org")) + bytes(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(5)
        question = struct.pack(">HHHHHH", 9, 256, 1, 0, 0, 0) + name + struct.pack(">HH", kind, 1)
        one.sendto(question, ("127.0.0.1", 53))
        answer = one.recv(512)
        print(answer[3] & 15, struct.unpack(">H", answer[6:8])[0])
"""
    box = connect(names=(WEB,))
    assert box.commands.run(["python3", "-c", script]).stdout.split() == ["0"] * 6
    assert internet.asked == []


def test_questions_are_rationed_and_rubbish_gets_no_answer(connect, internet):
    internet.names = {"example.org": [HOST]}
    script = """
import socket, struct
name = bytes([7]) + b"example" + bytes([3]) + b"org" + bytes(1)
question = struct.pack(">HHHHHH", 9, 256, 1, 0, 0, 0) + name + struct.pack(">HH", 16, 1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.settimeout(0.5)
    for size in range(len(question)):
        one.sendto(question[:size], ("127.0.0.1", 53))
    one.sendto(bytes(2000), ("127.0.0.1", 53))
    answers = 0
    for _ in range(1000):
        one.sendto(question, ("127.0.0.1", 53))
        one.settimeout(0.001)
        try:
            answers += len(one.recv(512)) > 0
        except TimeoutError:
            pass
print(answers)
"""
    box, other = (connect(names=(WEB,)) for _ in range(2))
    flood = box.commands.start(["python3", "-c", script], timeout_s=60)
    assert reach(other, "example.org") == ["hello"]
    assert int(flood.wait().stdout) < 1000 > BURST
    assert reach(box, "example.org") == ["hello"]


def test_a_nameserver_that_is_silent_is_a_failure(create, connect, internet, state_dir):
    silent = Egress(state_dir, uplink=internet.path, nameserver=(OTHER, 53), num_spare=0)
    try:
        box = connect(names=(WEB,), egress=silent)
        assert reach(box, "example.org") == ["unknown"]
        box.kill()
    finally:
        silent.close()


def test_the_hosts_nameserver_is_the_first_of_its_file(tmp_path):
    file = tmp_path / "resolv.conf"
    assert first_nameserver(file) is None
    file.write_text("# none\noptions ndots:1\nnameserver 192.0.2.53\nnameserver 192.0.2.54\n")
    assert first_nameserver(file) == ("192.0.2.53", 53)
