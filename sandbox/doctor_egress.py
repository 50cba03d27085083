"""What this host can do for sandboxes with a network, found by trying it."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import DockyardError
from sandbox.capability import Capability, finding
from sandbox.egress import namespaces, service
from sandbox.egress.forwarding import switched_off
from sandbox.egress.helped import Uplink
from sandbox.egress.trunk import POOL_4
from sandbox.helper import shared_helper
from sandbox.policy import Destination, Network, Policy
from sandbox.sandbox import Sandbox

_PATIENCE_S = 20.0
# An address that is allowed and where nobody listens, and one that is not allowed.
_ALLOWED, _REFUSED = "192.0.2.1", "192.0.2.2"
_TRY_BOTH = f"""
import socket, sys
for address in ("{_REFUSED}", "{_ALLOWED}"):
    with socket.socket() as one:
        one.settimeout(float(sys.argv[1]))
        print(one.connect_ex((address, 9)))
"""
_KERNEL = "use Linux 6.6 or later with BPF, and cgroups of version 2 mounted (beside version 1 will do)"
_TITLE, _COST = "egress policy", "sandboxes with a network are refused; network='none' needs nothing of it"


@finding("egress policy")
def probe_egress(state: Path, toolkit: Path, lacking: Sequence[str]) -> Capability:
    """Connects a sandbox, to a network made for this where that is possible, and has it try an allowed and
    another address."""
    if lacking:
        return Capability(_TITLE, "unverified", f"needs {' and '.join(lacking)}", _COST)
    try:
        if shared_helper(state) is not None:
            return _probe_helped(state, toolkit)
        service.check()
        said = _try_in_own_network(state, toolkit)
    except DockyardError as error:
        return Capability(_TITLE, "missing", error.message, _COST, _fix(error))
    except OSError as error:
        return Capability(_TITLE, "missing", str(error), _COST)
    if said != [errno.EPERM, errno.ECONNREFUSED]:
        return Capability(_TITLE, "missing", f"connecting gave {said}", _COST)
    return Capability(_TITLE, "enforced", "an allowed address was reached, another was refused by the kernel")


def _fix(error: DockyardError) -> str:
    """What mends it; its own hint may lead to this very list."""
    if os.geteuid() != 0:
        return "run as root, or have root run `dockyard node helper` for this user"
    return _KERNEL if "dockyard doctor" in error.hint else error.hint


def _probe_helped(state: Path, toolkit: Path) -> Capability:
    """The network is this machine's, so the allowed address is mostly nowhere, and nobody waits for it."""
    said = _try_both(state, toolkit, None, 0.05)
    if said[:1] != [errno.EPERM] or errno.EPERM in said[1:]:
        return Capability(_TITLE, "missing", f"connecting gave {said}", _COST)
    return Capability(_TITLE, "enforced", "an address was let pass, another was refused by the kernel")


def _try_in_own_network(state: Path, toolkit: Path) -> list[int]:
    uplink = namespaces.new_namespace()
    try:
        namespaces.configure(uplink, ["link set lo up", f"address add {_ALLOWED}/32 dev lo"])
        egress = service.Egress(state, uplink=Path(f"/proc/self/fd/{uplink}"), num_spare=0)
        try:
            return _try_both(state, toolkit, egress, _PATIENCE_S)
        finally:
            egress.close()
    finally:
        os.close(uplink)


def _try_both(state: Path, toolkit: Path, egress: Uplink | None, patience_s: float) -> list[int]:
    """Errors of connecting to the address that is refused, and to the one that is allowed."""
    allowed = Destination.model_validate({"to": _ALLOWED, "ports": [9]})
    policy = Policy(network=Network(destinations=(allowed,)))
    with Sandbox.create(policy=policy, egress=egress, state_dir=state, toolkit=toolkit) as sandbox:
        words = ["python3", "-c", _TRY_BOTH, str(patience_s)]
        return [int(word) for word in sandbox.commands.run(words, timeout_s=2 * _PATIENCE_S).stdout.split()]


@finding("egress routing")
def probe_routing() -> Capability:
    """Whether this machine passes on what sandboxes send: it does not change that by itself."""
    title, off = "egress routing", list(switched_off().values())
    if not off:
        return Capability(title, "unverified", "this machine forwards; answers need a route or masquerading")
    return Capability(
        title,
        "degraded",
        f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off",
        "networked sandboxes reach this machine's own addresses and no other",
        f"sysctl -w {' '.join(f'{name}=1' for name in off)}, and masquerade {POOL_4}",
    )
