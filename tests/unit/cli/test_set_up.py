"""Set-up: what it installs, and that it fails where nothing could run."""

import tomllib
from pathlib import Path

import pytest

from cli import assets, bootstrap
from sandbox.errors import UnsupportedError

PARTS = ("build_kernels", "build_init", "build_toolkit", "_fetch_sources")


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is made at once; the builders have tests of their own."""
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path))
    for name in PARTS:
        monkeypatch.setattr(assets, name, lambda *_: None)


def test_every_part_is_there() -> None:
    assert assets.main() == 0


@pytest.mark.parametrize(("part", "code"), list(zip(PARTS, (0, 1, 1, 0), strict=True)))
def test_only_what_every_sandbox_needs_fails_it(
    part: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise UnsupportedError("no C compiler")

    monkeypatch.setattr(assets, part, broken)
    assert assets.main() == code
    assert "no C compiler; without it, " in capsys.readouterr().out


def test_a_part_that_fails_fails_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", Path("/bin/false"))
    with pytest.raises(bootstrap.SetupError, match="every sandbox needs"):
        bootstrap.assets()


def test_torch_is_what_the_project_pins() -> None:
    project = tomllib.loads((bootstrap.ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={bootstrap.torch_version()}" in project["dependencies"]


def test_each_tool_is_installed_by_a_package() -> None:
    assert {package for package, _ in bootstrap.SYSTEM.values()} <= set(bootstrap.DEBIAN)
