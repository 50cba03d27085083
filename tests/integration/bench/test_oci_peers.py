"""What sandboxes are measured against runs, with the configuration that ours have."""

import os
from pathlib import Path

import pytest

from bench.oci_peer import TRUE, Peer, Workshop, peers, threads_for_peers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and maps ids")


@pytest.mark.parametrize("peer", peers(), ids=lambda peer: peer.name)
def test_a_peer_runs_what_ours_would(peer: Peer, tmp_path: Path):
    for above in tmp_path.parents[:3]:  # pytest's own; the peer's id walks through
        above.chmod(above.stat().st_mode | 0o011)
    workshop = Workshop(tmp_path)
    try:
        bundle = workshop.bundle([TRUE], peer)
        with threads_for_peers(1) as threads:
            threads.submit(bundle.run, peer).result()
            threads.submit(bundle.remove).result()
        assert not bundle.place.exists()
    finally:
        workshop.close()
