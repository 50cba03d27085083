"""Each error that the command line prints for machines has a code that is stable and documented."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import cli
from cli.console import fail
from cli.main import run
from cli.root import SystemFailed
from cluster.background import ServerFailed
from protocol.errors import DockyardError
from sandbox.errors import SandboxError

PAGE = Path(__file__).parents[3] / "docs" / "sandbox-errors.md"


def printable() -> list[type[DockyardError]]:
    """Every class that the modules of all commands bring."""
    for module in iter_modules(cli.__path__):
        import_module(f"cli.{module.name}")

    def below(kind: type[DockyardError]) -> Iterator[type[DockyardError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return list(dict.fromkeys(below(DockyardError)))


def test_every_class_has_a_code_that_the_page_knows() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", PAGE.read_text()))
    kinds = printable()
    assert {SystemFailed, ServerFailed, SandboxError} <= set(kinds)
    assert {kind.code for kind in kinds} <= documented


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["sandbox", "run", "--timeout", "soon", "--json", "--", "true"], "usage"),
        (["sandbox", "list", "--nope", "--json"], "usage"),
        (["sandbox", "run", "-e", "NO_SUCH", "--json", "--", "true"], "invalid_input"),
        (["sandbox", "run", "--memory-mb", "99999999999", "--json", "--", "true"], "shortage"),
        (["sandbox", "info", "no-id", "--json"], "invalid_argument"),
    ],
)
def test_what_is_refused_has_its_code(
    words: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path))
    assert run(words) > 0
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


def test_a_refusal_of_the_systems_has_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file in the place of a folder")
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path / "home"))
    assert run(["sandbox", "list", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "system_failed"


def test_a_servers_error_is_printed_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    fail(ServerFailed("words", kind="ResourceShortage", code="shortage", exit_code=4), as_json=True)
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert (error["type"], error["code"]) == ("ResourceShortage", "shortage")
    assert printed.err == "dockyard: ResourceShortage: words\n"
    fail(ServerFailed("words"), as_json=True)
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["code"]) == ("ServerFailed", "failed")
