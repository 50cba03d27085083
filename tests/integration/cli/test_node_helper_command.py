"""`dockyard node helper` says where it listens, for whom, and that it has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.helper import helper_socket

UID = 59_871  # nobody's on this machine


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_serves_and_that_it_has_ended(tmp_path: Path, number: signal.Signals) -> None:
    place = tmp_path / "helper.sock"
    words = [sys.executable, "-m", "cli.main", "node", "helper", "--user", str(UID), "--socket", str(place)]
    try:
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as helper:
            assert helper.stderr is not None
            first = helper.stderr.readline()
            assert place.is_socket()
            helper.send_signal(number)
            rest = helper.stderr.read()
    finally:
        helper_socket(UID).with_suffix(".lock").unlink(missing_ok=True)
    serving = f"listens at {place}, serving uid {UID} (Ctrl-C ends it and all it has made)"
    assert (first, rest) == (f"dockyard node helper: {serving}\n", "dockyard node helper: ended\n")
    assert (helper.returncode, place.exists()) == (0, False)
