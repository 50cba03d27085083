"""The path through everything: one run of the demo, and each thing that it promises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config import load_config
from cluster.state import StateFolder
from sandbox.audit import check_integrity

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    """The last line of `dockyard demo --json`, run as a user runs it."""
    command = [sys.executable, "-m", "cli.main", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["live_team", "replayed_team", "second_replay"])
def team(request: pytest.FixtureRequest, demo: dict[str, Any]) -> dict[str, Any]:
    return demo["bug_teams"][1] if request.param == "second_replay" else demo[request.param]


def test_prefill_and_decode_are_two_ray_actors(demo: dict[str, Any]) -> None:
    workers = demo["workers"]
    assert workers.keys() == {"prefill", "decode"}
    assert workers["prefill"]["pid"] != workers["decode"]["pid"]
    assert all(worker["ray_actor"] for worker in workers.values())


def test_every_planned_attempt_of_humaneval_has_a_verdict(demo: dict[str, Any]) -> None:
    scores = demo["humaneval"]
    planned = scores["problems"] * scores["attempts"]
    assert scores["of_planned"]["attempts"] == planned
    assert scores["of_scored"]["attempts"] == planned, "an attempt failed by our own fault"
    assert scores["pass_at_1"] == pytest.approx(scores["passed"] / planned)


def test_the_critical_path_sums_to_the_makespan(team: dict[str, Any]) -> None:
    assert team["critical_path_s"] == pytest.approx(team["makespan_s"], abs=1e-3)
    assert sum(segment["duration_s"] for segment in team["segments"]) == pytest.approx(team["makespan_s"])


def test_the_path_goes_through_the_model_the_tools_and_two_agents(team: dict[str, Any]) -> None:
    kinds = {segment["kind"] for segment in team["segments"]}
    assert {"model.prefill", "model.decode", "tool.run"} <= kinds
    assert {"spawn", "join"} & set(team["edges_on_path"])
    assert len(team["agents_on_path"]) >= 2


def test_time_is_explained(team: dict[str, Any]) -> None:
    assert team["attribution"]["untraced_share"] <= 0.01


def test_the_replayed_teams_mend_their_bugs(demo: dict[str, Any]) -> None:
    for replayed in demo["bug_teams"]:
        assert replayed["replay"]
        assert replayed["solved"]
        assert not replayed["diverged"], replayed["divergence"]


def test_the_live_team_is_live(demo: dict[str, Any]) -> None:
    live = demo["live_team"]
    assert not live["replay"]
    assert len(live["agents"]) == 4


def test_the_page_is_one_file_without_a_link_to_the_network(demo: dict[str, Any]) -> None:
    page = Path(demo["report_html"]).read_text()
    assert "<script" not in page
    assert "src=" not in page
    assert 'href="http' not in page
    assert "replay" in page


def test_nothing_is_left(demo: dict[str, Any]) -> None:
    state = StateFolder(load_config().state_dir)
    assert check_integrity(state.sandboxes).is_clean
    pids = {worker["pid"] for worker in demo["workers"].values()}
    assert not pids & {process.pid for process in psutil.process_iter()}
