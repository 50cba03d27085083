"""What a live run is given on the command line reaches its agents."""

from types import SimpleNamespace
from typing import Any

import pytest

from cli import teams as command
from cli.main import run
from cli.wiring import ModelAt
from protocol.errors import DockyardError
from teams.agent import AgentLimits


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models and limits that a run would start with; it ends there."""
    seen: list[Any] = []

    async def run_live(bench: object, name: str, at: ModelAt, agents: AgentLimits) -> None:
        seen.append((name, at, agents))
        raise DockyardError("far enough")

    monkeypatch.setattr(command, "run_live", run_live)
    monkeypatch.setattr(command, "require_toolkit", lambda settings: None)
    monkeypatch.setattr(command, "Workbench", SimpleNamespace(open=lambda settings, env: None))
    return seen


def test_the_bounds_of_a_live_agent_can_be_raised(taken: list[Any]) -> None:
    live = ["team", "run", "h11", "--model", "http://127.0.0.1:9/v1", "--api-key", "k"]
    assert run([*live, "--max-tokens", "4096", "--history-chars", "200000"]) == 1
    assert run(live) == 1
    (_, at, large), (_, _, small) = taken
    assert at == ModelAt("http://127.0.0.1:9/v1", "default", "k")
    assert large == AgentLimits(max_tokens=4096, history_chars=200_000)
    assert small == AgentLimits()


@pytest.mark.parametrize("option", [["--max-tokens", "0"], ["--history-chars", "10"]])
def test_a_bound_that_nothing_fits_in_is_refused(taken: list[Any], option: list[str]) -> None:
    for words in (["team", "run", "h11"], ["demo"]):
        assert run([*words, "--model", "http://127.0.0.1:9/v1", *option]) == 2
    assert taken == []
