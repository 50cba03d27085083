"""Who may have networked sandboxes, and what is left when he goes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_internet import (
    HOST,
    PRIVATE,
    REACH,
    wait_until,
)

from sandbox import Policy, cgroups
from sandbox.audit import Leftover, check_integrity, sweep
from sandbox.egress import links, namespaces, service
from sandbox.egress import trunk as trunk_module
from sandbox.egress.service import Egress
from sandbox.egress.trunk import Trunk
from sandbox.errors import StartError, UnsupportedError
from sandbox.journal import Journal, Record
from sandbox.policy import Network
from sandbox.processes import ProcessKey, boot_id, find_process


def test_a_host_without_the_programs_refuses_before_anything_is_made(create, state_dir, monkeypatch):
    for name, value in (("EGRESS_OBJECT", Path("/nowhere")), ("os", None)):
        with monkeypatch.context() as patch:
            if value is None:
                patch.setattr(service.os, "geteuid", lambda: 1000)
            else:
                patch.setattr(service, name, value)
            with pytest.raises(UnsupportedError, match=r"not built|needs root"):
                create(policy=Policy(network=Network()))
    assert Journal(state_dir).records() == []


def test_a_program_that_cannot_be_attached_refuses_the_sandbox(create, internet, state_dir):
    broken = Egress(state_dir, uplink=internet.path, num_spare=0)
    broken.close()
    with pytest.raises(StartError, match="connecting a sandbox to the network") as caught:
        create(policy=Policy(network=Network()), egress=broken)
    assert caught.value.phase == "network"
    assert internet.devices() == ["lo"]


OWNER = """
import os, sys
from pathlib import Path
from sandbox import Policy, Sandbox
from sandbox.egress.service import Egress
from sandbox.egress.trunk import Trunk
from sandbox.policy import Network
state, toolkit, uplink = map(Path, sys.argv[1:])
egress = Egress(state, uplink=uplink)
egress.fill()
box = Sandbox.create(policy=Policy(network=Network()), egress=egress, state_dir=state, toolkit=toolkit)
print(box.id, flush=True)
sys.stdin.read()
"""


def test_nothing_stays_of_an_owner_that_was_killed(internet, tmp_path, toolkit):
    words = [
        sys.executable,
        "-c",
        OWNER,
        str(tmp_path),
        str(toolkit),
        f"/proc/{os.getpid()}/fd/{internet.namespace}",
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith("sbx-")
        wait_until(lambda: len(links.host_ends(internet.namespace)) == 4)  # trunk, sandbox, two in stock
        ends = {each.name for each in links.host_ends(internet.namespace)}
        (record,) = Journal(tmp_path).records()
        assert len(ends & set(record.links)) == 1
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: internet.devices() == ["lo"])
    assert {each.kind for each in sweep(tmp_path)} >= {"cgroup", "record"}
    assert check_integrity(tmp_path).is_clean


def test_an_audit_finds_host_ends_whose_owner_has_gone(tmp_path, monkeypatch):
    """In a namespace of its own: an audit looks at the one that it runs in."""
    with subprocess.Popen(["true"]) as gone:
        key = find_process(gone.pid) or ProcessKey(gone.pid, 1)
    uplink = namespaces.new_namespace()
    namespaces.configure(uplink, ["link set lo up"])
    trunk = Trunk(uplink, cgroups.state_key(tmp_path), lambda ifindex: None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(trunk_module, "this_process", lambda: key)
            stale = links.make_link(trunk, lambda ifindex: None)
        live = links.make_link(trunk, lambda ifindex: None)
        ahead = Leftover("link", stale.name)
        assert list(namespaces.run_in(uplink, lambda: check_integrity(tmp_path)).leftovers) == [ahead]
        Journal(tmp_path).write(Record("sbx-gone", key, boot_id(), "function", (), links=(stale.name,)))
        found = [Leftover("link", stale.name, "sbx-gone"), Leftover("record", "sbx-gone", "sbx-gone")]
        assert list(namespaces.run_in(uplink, lambda: check_integrity(tmp_path)).leftovers) == found
        assert list(namespaces.run_in(uplink, lambda: sweep(tmp_path))) == found
        assert stale.name not in {each.name for each in links.host_ends(uplink)}
        links.remove_link(trunk, live)
        stale.let_go()
        trunk.close()
    finally:
        os.close(uplink)


BY_DEFAULT = """
import sys
from pathlib import Path
from sandbox import Sandbox
from sandbox.policy import presets
state, toolkit, gateway, reach, *calls = sys.argv[1:]
for _ in range(2):
    with Sandbox.create(policy=presets.agent(gateway), state_dir=state, toolkit=toolkit) as box:
        print(box.commands.run(["python3", "-c", reach, *calls]).stdout.split())
"""


def test_the_uplink_is_this_processs_own_network_by_default(internet, tmp_path, toolkit):
    """A process in the internet, whose sandboxes reach a gateway at one of its addresses."""
    words = [
        str(tmp_path),
        str(toolkit),
        f"{PRIVATE}:81",
        REACH,
        f"tcp('{PRIVATE}', 81)",
        f"tcp('{HOST}', 80)",
    ]
    done = namespaces.run_in(
        internet.namespace,
        lambda: subprocess.run(
            [sys.executable, "-c", BY_DEFAULT, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        ),
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("dockyard: sandboxes lack")]
    assert (done.stdout, said) == ("['hello', 'EPERM']\n" * 2, [])
    wait_until(lambda: internet.devices() == ["lo"])
    assert check_integrity(tmp_path).is_clean
