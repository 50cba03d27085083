"""`dockyard serve` for real: Ray, two actors, the gateway, signals, and what stays behind: nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from cluster.config import load_config
from cluster.state import DeploymentRecord, StateFolder, marked_processes
from cluster.status import outstanding_bytes
from engine import Engine, EngineConfig, SamplingParams
from engine.chat.template import ChatTemplate
from engine.gguf_file import open_gguf

START_S = 120.0
ASKED: dict[str, Any] = {
    "model": "smollm2", "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 16,
    "temperature": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """A running `dockyard serve`, the line that it announced itself with, and its record."""

    home: Path
    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    record: DeploymentRecord

    def sdk(self) -> openai.OpenAI:
        url = f"{self.ready['url']}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def left_behind(self) -> list[str]:
        """Processes of the deployment, Ray's daemons among them, its scratch folder, its record."""
        return left_behind(self.home, self.record)


def left_behind(home: Path, record: DeploymentRecord) -> list[str]:
    processes = [f"process {p.pid} {p.name()}" for p in marked_processes(record.id, record.scratch)]
    paths = [Path(record.scratch), *StateFolder(home).deployments.glob("*.json")]
    return processes + [str(path) for path in paths if path.exists()]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "DOCKYARD_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def dockyard(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command to its end."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=START_S, check=False
    )


@contextmanager
def serving(home: Path, *arguments: str) -> Generator[Server]:
    """A server on a free port; at the end it is told to end, if it has not, and must leave nothing."""
    command = [sys.executable, "-m", "cli.main", "serve", "smollm2", "--port", "0", "--json", *arguments]
    with (home / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (home / "serve.log").read_text()
        (record,) = StateFolder(home).records()
        yield Server(home, process, json.loads(line), record)
    finally:
        process.terminate()
        process.wait(START_S)
        process.stdout.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path, smollm2_file: Path) -> Iterator[Server]:
    config = home / "small.yaml"
    config.write_text(
        "workers: {threads: 1, kv_cache_bytes: 134217728}\nray: {object_store_bytes: 104857600}\n"
    )
    with serving(home, "--config", str(config)) as running:
        yield running
    assert running.left_behind() == []


@pytest.fixture(scope="module")
def expected(smollm2_file: Path) -> str:
    """The monolithic engine's answer, in this process and in the profile that servers run."""
    engine = Engine(EngineConfig(threads=1, kv_cache_bytes=64 << 20, profile="fast"))
    template = ChatTemplate(open_gguf(smollm2_file).require("tokenizer.chat_template"), {})
    return engine.generate([template.render(ASKED["messages"])], SamplingParams(max_tokens=16))[0]


def test_prefill_and_decode_are_two_living_ray_actors(server: Server) -> None:
    pids = {worker["role"]: worker["pid"] for worker in server.ready["workers"]}
    assert pids.keys() == {"prefill", "decode"}
    assert len({*pids.values(), server.process.pid, os.getpid()}) == 4
    for pid in pids.values():
        assert "ray::EngineActor" in " ".join(psutil.Process(pid).cmdline())
    status = httpx.get(f"{server.ready['url']}/dockyard/status", timeout=30).json()
    assert {worker["pid"]: worker["kind"] for worker in status["workers"]} == dict.fromkeys(
        pids.values(), "ray actor"
    )


def test_whole_and_streamed_answers_equal_the_monolithic_engine(server: Server, expected: str) -> None:
    with server.sdk() as sdk:
        answer = sdk.chat.completions.create(**ASKED)
        stream = sdk.chat.completions.create(**ASKED, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert answer.choices[0].message.content == streamed == expected
    kinds = [stage["kind"] for stage in answer.model_extra["dockyard"]["timeline"]]
    assert kinds[-3:] == ["model.prefill", "model.transfer", "model.decode"]


def test_a_prompt_over_the_positions_is_refused_by_their_number(server: Server) -> None:
    long = {**ASKED, "messages": [{"role": "user", "content": "a b " * 5000}]}
    with (
        server.sdk() as sdk,
        pytest.raises(openai.BadRequestError, match=r"length is \d+ tokens") as refused,
    ):
        sdk.chat.completions.create(**long)
    assert refused.value.param == "messages"


def test_the_servers_stages_are_told_and_are_no_result(server: Server) -> None:
    stages = (server.home / "serve.log").read_text().splitlines()
    for said in ("Ray is up", "the prefill worker", "the decode worker", "the gateway listens"):
        assert any(line.startswith(f"· {said}") for line in stages)


def test_memory_that_the_workers_have_not_taken_yet_is_known(server: Server) -> None:
    config = load_config(state_dir=str(server.home))
    status = httpx.get(f"{server.ready['url']}/dockyard/status", timeout=30).json()
    promised = sum(worker["promised_bytes"] for worker in status["workers"])
    assert 0 < sum(outstanding_bytes(config).values()) < promised


def test_a_schema_holds_and_choices_share_a_prompt_through_the_workers_processes(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
    asked = {**ASKED, "max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 3}
    with server.sdk() as sdk:
        answer = sdk.chat.completions.create(
            **asked,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
            logprobs=True,
        )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["city"] in ("Bern", "Rome")
        assert len(choice.logprobs.content) > 0


def test_every_process_of_the_deployment_is_found(server: Server) -> None:
    """By title where Ray wrote it over the environment, and by mark."""
    session = psutil.Process(server.process.pid).children(recursive=True)
    found = {p.pid for p in marked_processes(server.record.id, server.record.scratch)}
    assert {p.pid for p in session} <= found
    assert any(p.cmdline()[0].startswith("ray::DashboardAgent") for p in session)


def test_a_port_in_use_is_one_line_and_exit_code_4(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dockyard(home, "serve", "smollm2", "--port", str(port), "--json")
    assert done.returncode == 4
    (line,) = [line for line in done.stderr.splitlines() if "dockyard:" in line]
    assert f"port {port}" in done.stderr.replace("\n", " ")
    assert "ResourceShortage" in line
    assert json.loads(done.stdout.splitlines()[-1])["error"]["type"] == "ResourceShortage"


def test_a_bad_config_is_one_error_and_exit_code_2(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("workers: {threads: -1}")
    done = dockyard(home, "serve", "--config", str(config), "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "workers.threads is -1" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_sigterm_lets_a_running_stream_end_and_leaves_nothing(server: Server) -> None:
    """The last test of the module's server: it ends it. A request whose body stays away holds nothing up."""
    long = {**ASKED, "max_tokens": 60}
    where = httpx.URL(server.ready["url"])
    with socket.create_connection((where.host, where.port)) as half, server.sdk() as sdk:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n{")
        stream = iter(
            sdk.chat.completions.create(**long, stream=True, stream_options={"include_usage": True})
        )
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert half.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert rest[-1].usage.completion_tokens > 1
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in rest)
    assert server.process.wait(START_S) == 0
    assert (server.home / "serve.log").read_text().endswith("· drained; everything it started has ended\n")
    assert server.left_behind() == []


@pytest.mark.parametrize("moment", ["loading", "gcs_server", "ray::DashboardAgent", "Ray is up"])
def test_sigterm_while_it_starts_leaves_nothing(
    moment: str, tmp_path: Path, home: Path, server: Server, smollm2_file: Path
) -> None:
    """`moment`: what the server says, or the process that it has started."""
    command = [sys.executable, "-m", "cli.main", "serve", "smollm2", "--port", "0", "--monolithic"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [*command, "--config", str(home / "small.yaml")], env=environment(tmp_path), stderr=log, stdout=log,
        start_new_session=True,
    ) as starting:  # fmt: skip
        record = None
        while not (moment in (tmp_path / "log").read_text() or _has_started(starting.pid, moment)):
            record = next(iter(StateFolder(tmp_path).records()), record)
            assert starting.poll() is None, (tmp_path / "log").read_text()
        record = next(iter(StateFolder(tmp_path).records()), record)
        starting.terminate()
        code = starting.wait(START_S)
    log_text = (tmp_path / "log").read_text()
    assert code == 0, log_text
    assert "drained" not in log_text
    assert log_text.endswith(
        "· stopped while it loaded, before it served anything; everything it started has ended\n"
    )
    assert record is None or left_behind(tmp_path, record) == []
    assert StateFolder(tmp_path).records() == []


def _has_started(pid: int, name: str) -> bool:
    try:
        return any(name in child.cmdline()[0] for child in psutil.Process(pid).children(recursive=True))
    except (psutil.NoSuchProcess, IndexError):
        return False


def test_a_worker_that_is_late_is_named(home: Path, server: Server, smollm2_file: Path) -> None:
    config = home / "late.yaml"
    config.write_text((home / "small.yaml").read_text().replace("ray: {", "ray: {start_timeout_s: 0.01, "))
    done = dockyard(home, "up", "--monolithic", "--port", "0", "--config", str(config), "--json")
    assert done.returncode == 1
    assert "· Ray is up" in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["message"] == "the both worker did not load its model within 0.01 s"
    assert "ray.start_timeout_s" in error["hint"]


def test_down_ends_what_a_killed_server_left_and_is_silent_the_second_time(
    home: Path, smollm2_file: Path
) -> None:
    with serving(home, "--monolithic", "--config", str(home / "small.yaml")) as running:
        assert [worker["role"] for worker in running.ready["workers"]] == ["both"]
        running.process.kill()
        running.process.wait(START_S)
        first, second = (dockyard(home, "down") for _ in range(2))
        assert first.returncode == second.returncode == 0
        assert running.left_behind() == []
        assert (second.stdout, second.stderr) == ("", "")
