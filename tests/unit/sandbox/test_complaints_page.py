"""docs/complaints.md speaks of tests that are there."""

import re
from pathlib import Path

from bench.attack_cases import CASES

ROOT = Path(__file__).parents[3]


def test_each_test_that_it_names_is_there():
    page = (ROOT / "docs/complaints.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names, files = set(re.findall(r"`(test_\w+)`", page)), set(re.findall(r"`(test_\w+\.py)`", page))
    assert len(names) > 30
    assert [name for name in names if f"def {name}(" not in source] == []
    assert [name for name in files if not list((ROOT / "tests").rglob(name))] == []


def test_each_attack_that_it_names_is_there():
    page = (ROOT / "docs/complaints.md").read_text()
    numbers = {case.number for case in CASES}
    named = {int(each) for each in re.findall(r"attacks? (\d\d)", page)}
    assert named
    assert named <= numbers
