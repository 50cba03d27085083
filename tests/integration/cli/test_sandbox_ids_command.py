"""`dockyard sandbox list | info | set-timeout | kill`: of sandboxes that another process owns."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.native.build import build
from sandbox.places import default_home, default_state_dir, default_toolkit
from sandbox.toolkit import build_toolkit

OWNER = """
import sys
from sandbox import Sandbox
home, toolkit = sys.argv[1:]
with Sandbox.create(state_dir=f"{home}/sandbox", toolkit=toolkit, labels={"team": "red"}, idle_s=500) as box:
    print(box.id, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def owner(tmp_path: Path) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """A sandbox's id, and the process that has it."""
    build()
    toolkit = default_toolkit(default_state_dir())
    build_toolkit(toolkit)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(toolkit)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
        assert process.stdin is not None
        process.stdin.close()


def dockyard(home: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "sandbox", *words, "--json"], capture_output=True, text=True,
        env={**os.environ, "DOCKYARD_HOME": str(home)}, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def execute(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "sandbox", "exec", *words], capture_output=True, text=True,
        env={**os.environ, "DOCKYARD_HOME": str(home), "TOKEN": "7"}, input="in\n", timeout=120, check=False,
    )  # fmt: skip


def test_a_sandbox_is_listed_used_given_time_and_ended(
    owner: "tuple[str, subprocess.Popen[str]]", tmp_path: Path
):
    sandbox_id, process = owner
    code, said, _ = dockyard(tmp_path, "list", "--label", "team=red")
    (seen,) = said["sandboxes"]
    assert (code, seen["id"], seen["labels"]) == (0, sandbox_id, {"team": "red"})
    assert (seen["owner_pid"], seen["idle_s"], said["leftovers"]) == (process.pid, 500, [])
    assert dockyard(tmp_path, "list", "--label", "team=blue")[1]["sandboxes"] == []
    code, said, _ = dockyard(tmp_path, "set-timeout", sandbox_id, "1000", "--idle", "0")
    assert (code, said["idle_s"], 1000 <= said["lifetime_s"] < 1200) == (0, None, True)
    assert dockyard(tmp_path, "info", sandbox_id)[1]["state"] == "running"
    done = execute(
        tmp_path, sandbox_id, "--env", "TOKEN", "-i", "--", "cat; echo $TOKEN; echo bad >&2; exit 5"
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "in\n7\n", "bad\n")
    code, said, _ = dockyard(tmp_path, "kill", sandbox_id)
    assert (code, [each["id"] for each in said["killed"]]) == (0, [sandbox_id])
    code, said, _ = dockyard(tmp_path, "info", sandbox_id)
    assert (code, said["error"]["code"], said["error"]["reason"]) == (1, "gone", "killed")


def test_one_that_is_not_there_keeps_no_other_from_being_ended(
    owner: "tuple[str, subprocess.Popen[str]]", tmp_path: Path
):
    sandbox_id, missing = owner[0], "sbx-000000000000000"
    code, said, err = dockyard(tmp_path, "kill", missing, sandbox_id, "nonsense", sandbox_id)
    assert (code, [each["id"] for each in said["killed"]]) == (1, [sandbox_id])
    assert [(each["name"], each["code"]) for each in said["failed"]] == [
        (missing, "not_found"),
        ("nonsense", "invalid_argument"),
    ]
    assert f"there is no sandbox {missing}" in err
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "sandbox", "kill", sandbox_id, missing], capture_output=True,
        text=True, env={**os.environ, "DOCKYARD_HOME": str(tmp_path)}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["SandboxGone", "SandboxNotFound"]


def test_those_that_were_ended_are_printed(owner: "tuple[str, subprocess.Popen[str]]", tmp_path: Path):
    words = [sys.executable, "-m", "cli.main", "sandbox", "kill", owner[0], "nonsense"]
    env = {**os.environ, "DOCKYARD_HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, f"killed {owner[0]}\n")


def test_snapshots_that_are_not_there_are_all_said(tmp_path: Path):
    code, said, err = dockyard(tmp_path, "snapshots", "--delete", "one", "--delete", "two")
    assert (code, said["deleted"], [each["name"] for each in said["failed"]]) == (1, [], ["one", "two"])
    assert "snapshot='one' is not there" in err
    code, said, _ = dockyard(tmp_path, "snapshots", "--delete", "one")
    assert (code, said["error"]["code"]) == (2, "invalid_argument")


def test_errors_are_those_of_the_library(tmp_path: Path):
    code, said, err = dockyard(tmp_path, "info", "sbx-000000000000000")
    error = said["error"]
    assert (code, error["type"], error["code"], error["blame"]) == (
        1,
        "SandboxNotFound",
        "not_found",
        "caller",
    )
    assert (error["retryable"], error["retry_after_s"], error["node"]) == (False, None, os.uname().nodename)
    assert "there is no sandbox" in err
    code, said, _ = dockyard(tmp_path, "kill", "nonsense")
    assert (code, said["error"]["code"]) == (2, "invalid_argument")


def test_a_variable_by_name_reaches_the_command(tmp_path: Path):
    words = [
        sys.executable,
        "-m",
        "cli.main",
        "sandbox",
        "run",
        "--env",
        "TOKEN",
        "-e",
        "B=2",
        "--",
        "echo $TOKEN$B",
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "TOKEN": "1"}, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "12\n")
    missing = subprocess.run(
        [*words[:5], "--env", "NO_SUCH_NAME", "--", "true"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert missing.returncode == 2
    assert "NO_SUCH_NAME" in missing.stderr


def test_a_policy_of_a_file_holds_and_one_that_widens_is_refused(tmp_path: Path):
    def run(text: str, *command: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "policy.json").write_text(text)
        words = [
            sys.executable,
            "-m",
            "cli.main",
            "sandbox",
            "run",
            "--json",
            "--policy",
            f"{tmp_path}/policy.json",
        ]
        return subprocess.run(
            [*words, "--", *command], capture_output=True, text=True, timeout=120, check=False
        )

    done = run('{"masked": ["/usr/share"], "max_timeout_s": 5}', "ls /usr/share")
    assert (done.returncode, json.loads(done.stdout)["stdout"]) == (0, "")
    done = run('{"capabilities": ["CAP_SYS_ADMIN"]}', "true")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "invalid_argument")
    assert error["message"].startswith("capabilities=['CAP_SYS_ADMIN']: ")
    done = run('{"network": ', "true")
    assert (done.returncode, json.loads(done.stdout)["error"]["message"].split(":")[0]) == (2, "policy")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "/no/such/file.json"), "--policy /no/such/file.json: No such file"),
        (("--policy", "/etc"), "--policy /etc: Is a directory"),
        (("--policy", sys.executable), "not text in UTF-8"),
        (("--preset", "agent"), "--preset agent needs --gateway ADDR:PORT"),
        (("--preset", "agent", "--gateway", "here"), "gateway='here' is no address with a port"),
        (("--preset", "offline", "--gateway", "10.0.0.5:1"), "gateway='10.0.0.5:1' is for preset 'agent'"),
        (("--preset", "offline", "--policy", "/etc"), "are two policies"),
        (("--gateway", "10.0.0.5:1"), "is for --preset agent"),
    ],
)
def test_a_policy_that_cannot_be_is_bad_input(options: tuple[str, ...], said: str):
    words = [sys.executable, "-m", "cli.main", "sandbox", "run", "--json", *options, "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert said in json.loads(done.stdout)["error"]["message"]


def test_a_preset_is_a_policy_by_its_name():
    words = [sys.executable, "-m", "cli.main", "sandbox", "run", "--preset", "grader", "--", "echo made"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


def test_a_sandbox_lives_as_long_as_its_command_may_take_and_says_when_its_time_is_over():
    command = [sys.executable, "-m", "cli.main", "sandbox", "run", "--timeout", "7200", "--", "sleep", "100"]
    home = default_home()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "DOCKYARD_HOME": str(home)}
    ) as running:
        status = None
        while status is None:
            found = dockyard(home, "list")[1]["sandboxes"]
            status = next((each for each in found if each["owner_pid"] == running.pid), None)
        assert status["lifetime_s"] > 7200
        assert dockyard(home, "set-timeout", status["id"], "0.01")[0] == 0
        _, told = running.communicate(timeout=60)
    assert running.returncode == 137
    assert "has reached the end of its lifetime (while it lives, `dockyard sandbox set-timeout" in told
