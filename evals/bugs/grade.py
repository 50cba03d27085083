"""Grading: a fresh sandbox, the clean image, only the agent's diff, and the hidden tests."""

from pathlib import PurePosixPath

from evals.bugs.hidden_tests import ReportError, run_hidden_tests
from evals.bugs.task import BugTask, without
from protocol.errors import InvalidInput
from teams.team import Verdict, Verifier
from teams.workspace import Diff, SandboxFactory, apply_diff, within

# Files that change how Python or pytest starts. A mend of a bug needs none of them.
_STARTUP = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.py", "pytest.ini"})
_STARTUP_FOLDERS = frozenset({"_pytest", "pluggy", "pytest"})


def gradable(task: BugTask, diff: Diff) -> Diff:
    """The part of a diff that is graded: files of the source, no tests, nothing that steers the test run."""

    def counts(path: str) -> bool:
        pure = PurePosixPath(path)
        return (
            within(path, task.layout.source)
            and not within(path, task.layout.tests)
            and pure.name not in _STARTUP
            and pure.suffix != ".pth"
            and _STARTUP_FOLDERS.isdisjoint(pure.parts)
        )

    changed = {path: data for path, data in diff.changed.items() if counts(path)}
    return Diff(changed, tuple(path for path in diff.removed if counts(path)))


async def grade(task: BugTask, diff: Diff, sandboxes: SandboxFactory) -> Verdict:
    """Whether `diff` solves the task: every fail-to-pass and pass-to-pass test passes.

    Raises `InvalidInput` for a task that was not accepted, and the sandbox's errors; what the diff's code
    does to the tests is a verdict, never an error. May be cancelled.
    """
    if not task.pass_to_pass:
        raise InvalidInput(f"task {task.name} has no pass-to-pass tests", hint="accept it first")
    part = gradable(task, diff)
    if not part:
        return Verdict(False, "the diff changes no source file")
    source = without(apply_diff(task.workspace, part), task.layout.tests)
    try:
        run = await run_hidden_tests(f"grade.{task.name}", source, task.hidden, task.layout, sandboxes)
    except ReportError as error:
        return Verdict(False, str(error), shortfalls=error.shortfalls)
    wanted = (*task.fail_to_pass, *task.pass_to_pass)
    failed = [test for test in wanted if not run.passed(test)]
    passed = len(wanted) - len(failed)
    detail = f"{passed} of {len(wanted)} pass" + (f", first failure {failed[0]}" if failed else "")
    return Verdict(not failed, detail, passed, len(failed), run.shortfalls)


def verifier(task: BugTask, sandboxes: SandboxFactory) -> Verifier:
    """`grade` as a team's verifier."""

    async def verify(diff: Diff) -> Verdict:
        return await grade(task, diff, sandboxes)

    return verify
