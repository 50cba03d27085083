"""What a command says where no deployment answers for its model."""

import os
from pathlib import Path

import pytest

from cluster.config import DockyardConfig
from cluster.state import DeploymentRecord, StateFolder, started_at
from cluster.status import required_url
from protocol.errors import InvalidInput


@pytest.fixture
def config(tmp_path: Path) -> DockyardConfig:
    return DockyardConfig(model="smollm2", state_dir=tmp_path)


def write(config: DockyardConfig, model: str, *, url: str = "") -> None:
    """A deployment of this process; with a URL, it serves."""
    record = DeploymentRecord(
        id=f"dy-{model}", pid=os.getpid(), started_at=started_at(os.getpid()), scratch="/no/such",
        model=model, ready=bool(url), url=url,
    )  # fmt: skip
    StateFolder(config.state_dir).write(record)


def test_nothing_runs(config: DockyardConfig) -> None:
    with pytest.raises(
        InvalidInput, match=r"no deployment of smollm2 is running \(start one with: dockyard up"
    ):
        required_url(config, None)


def test_the_model_is_loading(config: DockyardConfig) -> None:
    write(config, "smollm2")
    with pytest.raises(InvalidInput, match="smollm2 is still loading"):
        required_url(config, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", ""])
def test_a_deployment_of_another_model_is_not_waited_for(config: DockyardConfig, url: str) -> None:
    write(config, "other", url=url)
    with pytest.raises(InvalidInput, match="no deployment of smollm2 is running") as told:
        required_url(config, None)
    assert ("only of other" in told.value.message) == bool(url)


def test_a_given_endpoint_needs_no_deployment(config: DockyardConfig) -> None:
    assert required_url(config, "http://127.0.0.1:9/v1/") == "http://127.0.0.1:9"
