"""`dockyard serve nano` for real: a folder's workers behind the gateway, and nothing of it afterwards."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
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
    command = [sys.executable, "-m", "cli.main", "serve", "nano", "--port", "0", "--json"]
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
