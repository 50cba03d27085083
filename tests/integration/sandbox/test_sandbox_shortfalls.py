"""What a host lacks is said once, and is in what a sandbox says of itself."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox import Policy, Sandbox, shortfalls
from sandbox.audit_log import entries
from sandbox.limits import LAYER_IN_MEMORY

LACKING = "apparmor"


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortfalls, "_told", set())


def test_each_shortfall_is_said_once_in_a_process(
    create, untold: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sandbox.making._profile", lambda rules, state: None)  # as on a host without it
    with caplog.at_level(logging.WARNING):
        first, second = create(), create()
    assert LACKING in first.info.shortfalls
    assert first.info.shortfalls == second.info.shortfalls
    (said,) = caplog.records
    lacking = set(first.info.shortfalls) - {LAYER_IN_MEMORY}
    assert all(each in said.getMessage() for each in lacking)


def test_a_layer_in_memory_is_told_where_the_host_has_no_other(
    create, untold: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Else it is the default, which `info` says."""
    assert LAYER_IN_MEMORY in create().info.shortfalls
    assert LAYER_IN_MEMORY not in caplog.text
    monkeypatch.setattr("sandbox.making.choose", lambda wish, state: "memory")  # as on a host without
    create(layer="disk-first")
    assert LAYER_IN_MEMORY in caplog.text


def test_what_the_caller_switched_off_is_no_shortfall(create, state_dir: Path):
    box = create(policy=Policy(without=frozenset({"landlock", "apparmor", "guard"})))
    assert not set(box.info.shortfalls) & {"landlock", "apparmor", "guard"}
    assert not any("as asked" in each for each in box.info.shortfalls)
    line = next(each for each in entries(state_dir) if each["sandbox"] == box.id)
    assert line["without"] == ["apparmor", "guard", "landlock"]
    assert line["lacking"] == list(box.info.shortfalls)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("runc"), reason="needs root and runc")
def test_another_runtime_is_taken_and_called_unverified(
    create, untold: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # the launcher has a /tmp of its own
        shutil.copy(shutil.which("runc") or "runc", Path(folder, "other-runtime"))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        box = create(substrate="container", runtime="other-runtime")
    assert box.info.unverified == ("runtime other-runtime",)
    assert "runtime other-runtime is unverified" in caplog.text
    assert box.commands.run("true").ok
    assert create(substrate="container", runtime="crun").info.unverified == ()


def test_the_doctor_calls_other_runtimes_unverified(
    tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "youki").write_text("#!/bin/sh\n")
    (tmp_path / "youki").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = {each.name: each.status for each in Sandbox.capabilities(state_dir=tmp_path, toolkit=toolkit)}
    assert found["youki"] == "unverified"
    assert "runsc" not in found or shutil.which("runsc")
