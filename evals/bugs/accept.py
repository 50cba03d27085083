"""The acceptance check: a task is taken only when its tests tell the old source from the new one, twice.

Accepted are: at least one fail-to-pass test, exactly those that the task names; pass-to-pass tests, for a
recipe at least 20 and as many as it promises; the same ids in two runs; no clock, path or address in an id.
The time of a run is bounded by the layout's `timeout_s`.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from evals.bugs.hidden_tests import ReportError, TestRun, run_hidden_tests
from evals.bugs.task import BugTask, without
from protocol.errors import InvalidInput
from teams.workspace import SandboxFactory, Tree

MIN_PASS_TO_PASS = 20
_MAX_NAMED = 5  # tests of each side, in an error
_RULE = 1  # raise when the rule changes, so that kept acceptances are made anew
_UNSTABLE = re.compile(r"/tmp/|/workspace|\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d[T ]\d\d|0x[0-9a-f]{6,}")


class NotAcceptedError(InvalidInput):
    """The task's tests do not do what a task needs. Says which rule is broken."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tests that decide, sorted."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


async def accept(task: BugTask, sandboxes: SandboxFactory) -> Accepted:
    """Runs the hidden tests over the old and the new source, each twice in fresh sandboxes.

    Raises `NotAcceptedError`, `InvalidInput` for a task without a fixed source. May be cancelled.
    """
    if task.fixed is None:
        raise InvalidInput(f"task {task.name} has no fixed source to check against", hint="add fixed/")
    old = await _run_twice(task, "old", task.workspace, sandboxes)
    new = await _run_twice(task, "new", task.fixed, sandboxes)
    return judged(task, old, new)


def judged(task: BugTask, old: TestRun, new: TestRun) -> Accepted:
    """Applies the rule to one run of each side. Raises `NotAcceptedError`."""
    passing = [test for test, state in new.states.items() if state == "passed"]
    fail_to_pass = tuple(sorted(test for test in passing if not old.passed(test)))
    pass_to_pass = tuple(sorted(test for test in passing if old.passed(test)))
    _require(task, bool(fail_to_pass), "no test fails on the old and passes on the new source")
    as_stated = set(fail_to_pass) == set(task.fail_to_pass)
    _require(
        task, as_stated, f"fail_to_pass states {_named(task.fail_to_pass)}; found {_named(fail_to_pass)}"
    )
    enough = len(pass_to_pass) >= MIN_PASS_TO_PASS or task.num_pass_to_pass is None
    _require(task, enough and bool(pass_to_pass), f"only {len(pass_to_pass)} tests pass on both sides")
    agreed = task.num_pass_to_pass in (None, len(pass_to_pass))
    _require(task, agreed, f"{len(pass_to_pass)} tests pass on both sides, stated {task.num_pass_to_pass}")
    unstable = [test for test in (*fail_to_pass, *pass_to_pass) if _UNSTABLE.search(test)]
    _require(task, not unstable, f"a test id holds a clock, a path or an address: {unstable[:1]}")
    return Accepted(fail_to_pass, pass_to_pass)


async def prepare(task: BugTask, cache_dir: Path, sandboxes: SandboxFactory) -> BugTask:
    """The task with its tests, accepted now or, for the same files, in an earlier run of this cache.

    Raises as `accept`.
    """
    if task.fixed is None and task.pass_to_pass:
        return task  # a folder's author names the tests that decide
    kept = cache_dir / f"accepted-{task.name}-{_fingerprint(task)}.json"
    tests = _read_kept(kept)
    if tests is None:
        accepted = await accept(task, sandboxes)
        tests = _Kept(fail_to_pass=accepted.fail_to_pass, pass_to_pass=accepted.pass_to_pass)
        _keep(kept, tests)
    return replace(task, fail_to_pass=tests.fail_to_pass, pass_to_pass=tests.pass_to_pass)


async def _run_twice(task: BugTask, side: str, source: Tree, sandboxes: SandboxFactory) -> TestRun:
    bare = without(source, task.layout.tests)
    try:
        first, second = [
            await run_hidden_tests(f"accept.{task.name}.{side}", bare, task.hidden, task.layout, sandboxes)
            for _ in range(2)
        ]
    except ReportError as error:
        raise NotAcceptedError(f"task {task.name}: the {side} source: {error}") from error
    _require(task, first.states == second.states, f"two runs over the {side} source differ")
    return first


def _require(task: BugTask, holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotAcceptedError(f"task {task.name} is not accepted: {otherwise}")


def _named(tests: Sequence[str]) -> str:
    more = f" and {len(tests) - _MAX_NAMED} more" if len(tests) > _MAX_NAMED else ""
    return ", ".join(tests[:_MAX_NAMED]) + more


def _fingerprint(task: BugTask) -> str:
    sums = hashlib.sha256(json.dumps([_RULE, task.layout.model_dump(), task.fail_to_pass]).encode())
    for tree in (task.workspace, task.hidden, task.fixed or Tree({})):
        for part in _parts(tree):
            sums.update(hashlib.sha256(part).digest())
    return sums.hexdigest()[:16]


def _parts(tree: Tree) -> Iterable[bytes]:
    for path, data in sorted(tree.files.items()):
        yield path.encode()
        yield data


def _read_kept(path: Path) -> _Kept | None:
    """None where there is none that can be read: it is a cache, and made anew."""
    try:
        return _Kept.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _keep(path: Path, tests: _Kept) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(tests.model_dump_json())
    draft.replace(path)
