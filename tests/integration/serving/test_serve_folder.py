"""`dockyard serve nano` for real: a folder's workers behind the gateway, and nothing of it afterwards."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq
from test_serve_command import START_S, dockyard, environment, left_behind

from cluster.state import StateFolder
from engine import Engine, EngineConfig, SamplingParams
from engine.chat.deepseek_prompt import BEGIN
from engine.model_path import NANO

TEXT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    small = "workers: {threads: 1, kv_cache_bytes: 33554432}\nray: {object_store_bytes: 104857600}\n"
    (home / "small.yaml").write_text(small)
    return home


@pytest.fixture(scope="module")
def sdk(home: Path, cpu_library: Path) -> Iterator[openai.OpenAI]:
    events = {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{home}/events", "topic": "kv@nano",
        "replay_endpoint": f"ipc://{home}/replay",
    }  # fmt: skip
    command = [sys.executable, "-m", "cli.main", "serve", "nano", "--port", "0", "--json"]
    command += ["--kv-events-config", json.dumps(events)]
    with (home / "serve.log").open("w") as log, subprocess.Popen(
        [*command, "--config", str(home / "small.yaml")], env=environment(home), stdout=subprocess.PIPE,
        stderr=log, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (home / "serve.log").read_text()
            (record,) = StateFolder(home).records()
            url = f"{json.loads(line)['url']}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0
    assert left_behind(home, record) == []


def test_a_text_goes_on_as_in_the_engine(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "nano", "prompt": [TEXT, "import"], "max_tokens": 12, "temperature": 0}
    whole = sdk.completions.create(**asked)
    streamed = ["", ""]
    for chunk in sdk.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    engine = Engine(EngineConfig(model="nano", threads=1, kv_cache_bytes=8 << 20, profile="fast"))
    expected = engine.generate([f"{BEGIN}{TEXT}", f"{BEGIN}import"], SamplingParams(max_tokens=12))
    engine.close()
    assert [choice.text for choice in whole.choices] == streamed == expected


def test_its_vocabulary_has_the_tokens_of_a_chat(sdk: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    answer = sdk.chat.completions.create(model="nano", messages=hello, max_tokens=8, temperature=0)
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].message.model_extra["reasoning_content"]
    quick = sdk.chat.completions.create(
        model="nano", messages=hello, max_tokens=8, temperature=0, reasoning_effort="none"
    )
    assert quick.choices[0].message.content
    assert "reasoning_content" not in quick.choices[0].message.model_extra


def test_routers_hear_of_blocks_from_both_workers(sdk: openai.OpenAI, home: Path) -> None:
    """By a reader of vLLM's form: topic, number, arrays; and who comes late asks for what it has missed."""
    text = "\n".join(f"def f{n}(a, b):\n    return a * {n} + b" for n in range(12))
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger, reader.rcvtimeo = 0, 60_000
        reader.subscribe(b"kv@")
        for suffix in ("", "_dp1"):
            reader.connect(f"ipc://{home}/events{suffix}")
        ranks: set[int] = set()
        for number in range(50):
            sdk.completions.create(model="nano", prompt=f"{number} {text}", max_tokens=4, temperature=0)
            while reader.poll(200):
                topic, _, payload = reader.recv_multipart()
                _, events, rank = msgspec.msgpack.decode(payload)
                assert topic == b"kv@nano"
                kind, hashes, _, token_ids, size, *_, medium, _ = events[0]
                assert (kind, medium, len(token_ids)) == ("BlockStored", "GPU", len(hashes) * size)
                ranks.add(rank)
            if ranks == {0, 1}:
                break
        assert ranks == {0, 1}
        with context.socket(zmq.DEALER) as asker:
            asker.linger, asker.rcvtimeo = 0, 60_000
            asker.connect(f"ipc://{home}/replay")
            asker.send_multipart([b"", bytes(8)])
            _, first, payload = asker.recv_multipart()
            assert first == bytes(8)
            assert msgspec.msgpack.decode(payload)[1][0][0] == "BlockStored"


def test_a_scrape_has_workers_tiers_and_stages(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="nano", prompt=TEXT, max_tokens=4, temperature=0)
    stages = answer.model_extra["dockyard"]["stages_ms"]
    assert stages.keys() == {"queue", "encoder", "bridge", "decoder"}
    assert all(spent > 0 for spent in stages.values())
    page = httpx.get(f"{str(sdk.base_url).removesuffix('/v1/')}/metrics", timeout=60).text
    for role in ("prefill", "decode"):
        assert f'dockyard:worker_up{{engine="{role}",model_name="nano"}} 1.0' in page
        for tier in ("device", "host", "windows"):
            labels = f'{{engine="{role}",model_name="nano",tier="{tier}"}}'
            assert f"dockyard:kv_tier_entries{labels} " in page
    for stage in ("encoder", "bridge", "decoder"):
        labels = f'{{model_name="nano",stage="{stage}"}}'
        (line,) = [
            line
            for line in page.splitlines()
            if line.startswith(f"dockyard:request_stage_seconds_sum{labels}")
        ]
        assert float(line.rpartition(" ")[2]) > 0


def test_events_that_cannot_be_meant_are_refused_before_anything_starts(home: Path) -> None:
    for text, told in (("{", "--kv-events-config is no JSON"), ('{"endpoint": "5557"}', "workers.kv_events")):
        done = dockyard(home, "serve", "nano", "--port", "0", "--kv-events-config", text)
        assert done.returncode == 2
        assert told in " ".join(done.stderr.split())


def test_a_folder_of_another_family_is_refused_before_anything_starts(home: Path, tmp_path: Path) -> None:
    for config, told in (
        ('{"model_type": "bert"}', "model_type is 'bert'"), ("{", "not JSON"), (None, "No such file"),
    ):  # fmt: skip
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        else:
            (tmp_path / "config.json").unlink()
        done = dockyard(home, "serve", str(tmp_path), "--port", "0", "--json")
        assert done.returncode != 0
        error = json.loads(done.stdout.splitlines()[-1])["error"]
        assert error["type"] == "BrokenModelFile"
        assert told in error["message"]
        assert "Ray is up" not in done.stderr


def test_doctor_counts_a_folders_memory(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "nano.yaml"
    config.write_text(f"model: {NANO}\n")
    done = dockyard(home, "doctor", "--json", "--config", str(config))
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert "1 files" in checks["model"]["detail"]
    assert "2 workers fit" in checks["placement"]["detail"]
