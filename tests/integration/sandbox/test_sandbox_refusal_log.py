"""What a networked sandbox is refused is in the audit log, and it cannot fill the log with it."""

import os
from pathlib import Path

import pytest
from sandbox_internet import HOST, OTHER, WEB, attempt, wait_until

from sandbox.audit_log import FILE_NAME, entries
from sandbox.refusal_log import MAX_LINES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a network needs root")
FLOOD = """
import socket, sys
for port in range(2000, 6000):
    for one in (socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)):
        try:
            one.connect((sys.argv[1], port))
        except OSError:
            pass
        one.close()
"""


def lines(state_dir: Path, sandbox: str, deed: str) -> list[dict]:
    return [each for each in entries(state_dir) if (each["sandbox"], each["deed"]) == (sandbox, deed)]


def test_a_refusal_is_a_line_with_where_it_went(connect, substrate: str, state_dir: Path):
    box = connect(WEB, substrate=substrate)
    assert attempt(box, f"tcp('{HOST}', 80)", f"tcp('{OTHER}', 80)")[0] == ["hello", "EPERM"]
    (line,) = lines(state_dir, box.id, "refused")
    assert (line["hook"], line["address"], line["port"], line["count"]) == ("connect", OTHER, 80, 1)
    assert HOST not in str(lines(state_dir, box.id, "refused"))
    box.kill()
    (end,) = lines(state_dir, box.id, "end")
    assert (end["refused"], end["left_out"]) == (1, 0)


def test_a_name_that_is_not_allowed_is_a_line(connect, internet, state_dir: Path):
    box = connect(names=({"domains": ["example.org"], "ports": [80]},))
    box.commands.run("python3 -c \"import socket; socket.getaddrinfo('leak-1234.example.net', 80)\"")
    wait_until(lambda: lines(state_dir, box.id, "refused"))
    line = lines(state_dir, box.id, "refused")[0]
    assert (line["hook"], line["address"], line["why"]) == ("name", "leak-1234.example.net", "is not allowed")


def test_a_sandbox_that_is_refused_without_end_does_not_fill_the_log(connect, state_dir: Path):
    box = connect(WEB)
    before = (state_dir / FILE_NAME).stat().st_size
    assert box.commands.run(["python3", "-c", FLOOD, OTHER], timeout_s=60).ok
    refused = sum(each.count for each in box.denials)
    assert refused >= 8000
    box.kill()
    assert len(lines(state_dir, box.id, "refused")) <= MAX_LINES
    assert (state_dir / FILE_NAME).stat().st_size - before < (MAX_LINES + 10) * 1024
    (end,) = lines(state_dir, box.id, "end")
    assert end["refused"] == refused
    assert 0 < end["left_out"] <= refused
