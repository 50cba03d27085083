"""Runs hidden tests in a fresh sandbox and reads what pytest reports.

The code under test runs in the same process as pytest and could try to forge its report. What stands
against that: the report's path is random and read from outside, the exit code must fit the report, and two
canaries with random names ride along, one that must pass and one that must fail.
"""

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from evals.bugs.recipe import Layout
from protocol.errors import DockyardError
from teams.workspace import AgentSandbox, SandboxFactory, Tree, WorkspaceError

TestState = Literal["passed", "failed", "skipped"]
_PYTEST = "PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -p no:cacheprovider -o addopts= -o filterwarnings="
_MAX_REPORT_BYTES = 16_000_000
_ENCODING = re.compile(r"""\s*<\?xml[^>]*?\sencoding\s*=\s*["']([^"']*)""")


class ReportError(DockyardError):
    """pytest left no report, or one that does not fit what was run. Says which. `shortfalls` are those of the
    sandbox that it ran in."""

    shortfalls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TestRun:
    """What one run of the hidden tests gave, the canaries left out."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    states: Mapping[str, TestState]
    output: str
    shortfalls: tuple[str, ...] = ()  # of the sandbox

    def passed(self, test: str) -> bool:
        """Whether a test ran and passed."""
        return self.states.get(test) == "passed"


async def run_hidden_tests(
    name: str, source: Tree, hidden: Tree, layout: Layout, sandboxes: SandboxFactory
) -> TestRun:
    """Runs `hidden` over `source` in a sandbox of its own, made for this and killed afterwards.

    Raises `ReportError` where the run gave no report that can be trusted, and the sandbox's errors.
    May be cancelled.
    """
    canary = _Canary(secrets.token_hex(6), layout.tests[0])
    tree = Tree({**source.files, **hidden.files, canary.path: canary.code})
    sandbox = await sandboxes(name, tree)
    try:
        return await _run(sandbox, layout, canary)
    except ReportError as error:
        error.shortfalls = tuple(sandbox.shortfalls)
        raise
    finally:
        await sandbox.kill()


async def _run(sandbox: AgentSandbox, layout: Layout, canary: "_Canary") -> TestRun:
    report = f".report-{secrets.token_hex(8)}.xml"
    arguments = shlex.join((*layout.pytest_args, f"--junitxml={report}", *layout.tests))
    result = await sandbox.run(f"{_PYTEST} {arguments}", timeout_s=layout.timeout_s)
    if result.reason != "exit":
        raise ReportError(f"the hidden tests were ended: {result.reason}")
    try:
        data = await sandbox.read(report)
    except WorkspaceError as error:  # the code under test put something else in its place
        raise ReportError(f"the report cannot be read: {error}") from error
    if data is None:
        raise ReportError(f"pytest left no report (exit {result.exit_code}): {result.output[-300:]}")
    states = read_report(data)
    return TestRun(canary.checked(states, result.exit_code), result.output, tuple(sandbox.shortfalls))


def read_report(data: bytes) -> dict[str, TestState]:
    """The state of each test in a JUnit report. Raises `ReportError` for what is none."""
    text = _plain_text(data)
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, LookupError, ValueError, RecursionError) as error:
        raise ReportError(f"the report is not valid XML: {error}") from error
    states: dict[str, TestState] = {}
    for case in root.iter("testcase"):
        test = f"{case.get('classname', '')}::{case.get('name', '')}"
        state = _state(case)
        # A test may be listed twice, when its teardown fails: the worse entry counts.
        states[test] = state if states.get(test, "passed") == "passed" else states[test]
    return states


def _plain_text(data: bytes) -> str:
    """The report as text, refused where a parser could read other declarations in its bytes than we do."""
    if len(data) > _MAX_REPORT_BYTES:
        raise ReportError(f"the report has {len(data)} bytes, more than {_MAX_REPORT_BYTES}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"the report is not UTF-8: {error}") from error
    declared = _ENCODING.match(text)
    if "\0" in text or (declared and declared[1].lower() != "utf-8"):
        raise ReportError("the report is in another encoding than UTF-8")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ReportError("the report declares entities")
    return text


def _state(case: ElementTree.Element) -> TestState:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


class _Canary:
    """A hidden test file of ours, with names that cannot be guessed."""

    def __init__(self, token: str, folder: str) -> None:
        good, bad = secrets.token_hex(6), secrets.token_hex(6)
        self.path = f"{folder.rstrip('/')}/test_{token}.py"
        self.code = f"def test_{good}():\n    pass\n\n\ndef test_{bad}():\n    assert False\n".encode()
        self._good, self._bad = f"test_{good}", f"test_{bad}"

    def checked(self, states: Mapping[str, TestState], exit_code: int | None) -> dict[str, TestState]:
        """The states without the canaries'. Raises `ReportError` where they, or the exit code, do not fit."""
        found = {test.rpartition("::")[2]: state for test, state in states.items()}
        honest = found.get(self._good) == "passed" and found.get(self._bad) == "failed"
        if not honest or exit_code != 1:  # 1: pytest ran to its end, and some test failed
            raise ReportError(
                f"the report cannot be trusted: it does not fit what was run (exit {exit_code})"
            )
        return {
            test: state
            for test, state in states.items()
            if test.rpartition("::")[2] not in (self._good, self._bad)
        }
