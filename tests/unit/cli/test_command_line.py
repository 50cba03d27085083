"""Bad input on the command line: a line that names the thing and the way out, and an exit code for it."""

import json
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from cli.main import run
from sandbox.places import default_home

SET_UP = default_home()  # where `make setup` has put the toolkit, if it has run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What a person reads, without the line breaks of a narrow terminal."""
    return " ".join(capsys.readouterr().err.split())


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no-such-model", "--port", "0"]) == 2
    assert "'no-such-model' is neither a file nor a folder nor one of: nano, smollm2" in said(capsys)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    assert run(["serve", str(broken), "--port", "0"]) == 2
    assert "broken.gguf" in said(capsys)


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert run(["serve", "smollm2", "--port", str(port)]) == 4
    assert f"port {port}" in said(capsys)


def test_too_little_memory_says_how_much_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("workers: {kv_cache_bytes: 1000000000000}\n")
    assert run(["serve", "smollm2", "--port", "0", "--config", str(config)]) == 4
    assert "needs 9" in said(capsys)


def test_an_unknown_field_of_the_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("workers: {thread: 3}\n")
    assert run(["status", "--config", str(config)]) == 2
    assert "workers.thread" in said(capsys)


def test_a_missing_configuration_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--config", "/no/such.yaml"]) == 2
    assert "/no/such.yaml" in said(capsys)


def test_the_demo_without_a_toolkit_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo"]) == 3
    assert "make setup" in said(capsys)


def test_a_flag_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "http"]) == 2
    assert "--port" in said(capsys)


def test_machines_get_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "hello", "--json"]) == 2
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert "no deployment" in error["message"]
    assert "dockyard up" in error["hint"]


def test_down_is_silent_when_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["down"]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == ""


@pytest.mark.parametrize(
    "command",
    [[], ["demo"], ["serve"], ["up"], ["down"], ["status"], ["doctor"], ["doctor", "model"], ["chat"],
     ["eval", "run", "humaneval"], ["eval"], ["eval", "run"], ["sandbox"], ["team"], ["model"],
     ["sandbox", "run"], ["sandbox", "list"], ["sandbox", "sweep"], ["sandbox", "snapshots"],
     ["sandbox", "log"], ["sandbox", "exec"], ["sandbox", "info"], ["sandbox", "set-timeout"],
     ["sandbox", "kill"], ["team", "run"], ["team", "list"], ["node"], ["node", "helper"]],
)  # fmt: skip
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example: " in text
    groups = ([], ["eval"], ["eval", "run"], ["sandbox"], ["team"], ["model"])
    assert command in groups or command[0] == "node" or "--json" in text  # a helper has no result


@pytest.mark.parametrize(
    "arguments", [["serve", "--nope"], ["nope"], ["sandbox", "run"], ["serve", "no-such"]]
)
def test_machines_get_every_error_as_one_object(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["message"]
    assert said["hint"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sandbox", "run", "--timeout", "0", "--json", "--", "true"], "--timeout"),
        (["chat", "--max-tokens", "none", "--json"], "--max-tokens"),
        (["sandbox", "exec", "--json"], "'ID'"),
        (["sandbox", "log", "--last", "--json"], "--last"),
    ],
)
def test_machines_are_told_which_option_it_is(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert named in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("seconds", [["-5"], ["-0.5", "--idle", "3"], ["--", "-5"], ["-inf"]])
def test_a_time_below_zero_is_told_its_range(seconds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "set-timeout", "sbx-000000000000000", *seconds]) in (1, 2)
    told = said(capsys)
    assert "is out of range (use 0.001 to 2,592,000)" in told or "SandboxNotFound" in told
    assert ("SandboxNotFound" in told) == ("--" in seconds)  # which is looked for first


@pytest.mark.parametrize("seconds", ["-1", "1e18", "nan"])
def test_an_idle_time_out_of_range_is_told_all_that_the_flag_takes(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "set-timeout", "sbx-000000000000000", "--idle", seconds]) == 2
    assert "(use 0.001 to 2,592,000, or 0 for as long as it lives)" in said(capsys)


@pytest.mark.parametrize("words", [["run"], ["exec", "sbx-000000000000000"]])
@pytest.mark.parametrize("seconds", ["inf", "1e18"])
def test_a_timeout_that_nothing_has_is_told_before_anything_is_made(
    words: list[str], seconds: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", *words, "--timeout", seconds, "--", "true"]) == 2
    assert "--timeout=" in said(capsys)
    assert not (state / "sandbox").exists()


def test_a_variable_without_a_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "run", "--env", "=secret", "--", "true"]) == 2
    told = said(capsys)
    assert ("without a name" in told, "secret" in told) == (True, False)


def test_machines_get_what_the_system_refuses_as_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path / "file"))
    assert run(["down", "--json"]) == 1
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["message"] == f"{tmp_path}/file/deployments: Not a directory"
    assert "DOCKYARD_HOME" in error["hint"]
    assert "Traceback" not in captured.err


def test_ctrl_c_is_told_and_is_130(state: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "chat", "--url", "http://127.0.0.1:1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdout is not None
        assert chat.stdout.read(2) == "> "
        chat.send_signal(signal.SIGINT)
        _, told = chat.communicate()
    assert "interrupted" in told
    assert chat.returncode == 130


def test_an_evaluation_that_scored_nothing_has_failed(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "toolkit").mkdir(parents=True)
    arguments = ["eval", "run", "humaneval", "--limit", "1", "--url", "http://127.0.0.1:1", "--json"]
    assert run(arguments) == 1
    captured = capsys.readouterr()
    told = " ".join(captured.err.split())
    assert "no attempt could be scored: model smollm2: connection refused: http://127.0.0.1:1/v1" in told
    run_id = json.loads(captured.out)["run_id"]
    resume = f"dockyard eval run humaneval --limit 1 --url http://127.0.0.1:1 --resume {run_id}"
    assert told.index(resume) < told.index("HumanEval/0")
    assert json.loads(captured.out)["of_scored"]["attempts"] == 0


def test_a_flag_of_a_sandboxs_command_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "run", "--nope", "--", "ls", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "command",
    [["chat", "hello", "--url"], ["eval", "run", "humaneval", "--limit", "1", "--url"],
     ["team", "run", "HumanEval/0", "--url"], ["team", "run", "h11", "--model"], ["demo", "--model"]],
)  # fmt: skip
@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://here/v1", "http://", "http://h:port/v1", "http://[::1/v1"]
)
def test_what_is_no_url_is_named(
    command: list[str], url: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "toolkit").mkdir(parents=True)
    assert run([*command, url]) == 2
    assert f"InvalidInput: {url!r} is no URL" in said(capsys)


def test_a_team_at_a_dead_endpoint_says_why(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it says anything of programs. Needs the sandboxes of a set-up."""
    arguments = ["team", "run", "HumanEval/0", "--url", "http://127.0.0.1:1"]
    if not SET_UP.joinpath("toolkit").exists():
        pytest.skip("make setup has not been run")
    state.mkdir()
    (state / "toolkit").symlink_to(SET_UP / "toolkit")
    assert run(arguments) == 1
    told = said(capsys)
    assert "NothingDrawnError: no program could be drawn: model smollm2: connection refused: http" in told
    assert "none of" not in told


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"dockyard {metadata.version('dockyard')}\n"


def test_a_limit_beyond_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "run", "--memory-mb", "16000000", "--", "true"]) == 4
    assert "this machine has" in said(capsys)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_model_that_is_not_there_is_all_that_is_said(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path))
    assert run([command, "no-such"]) == 2
    assert capsys.readouterr().err.startswith("dockyard: UnknownModel: model 'no-such'")


def test_a_folder_without_a_model_says_what_one_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path / "home"))
    assert run(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
