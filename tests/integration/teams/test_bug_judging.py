"""Acceptance and grading of a small task in real sandboxes, attacks on the judge among it."""

import asyncio

import pytest

from evals.bugs import NotAcceptedError, grade, load_folder, prepare
from teams.workspace import Diff

BUGGY = "def double(x):\n    return x + 2\n"
RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = """
from calc import double


def test_two():
    assert double(2) == 4


def test_three():
    assert double(3) == 6
"""
TASK = """
name: calc
instruction: double() adds two
source: [calc.py, calc]
tests: [tests]
fail_to_pass: [{bad}]
timeout_s: 20
"""

# Each is a file calc.py of an agent that wants to pass without mending anything.
ATTACKS = {
    "leaves early": BUGGY + "import os\nos._exit(0)\n",
    "leaves early as if a test had failed": BUGGY + "import os\nos._exit(1)\n",
    "makes every report pass": BUGGY
    + """
import _pytest.reports as reports
make = reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    report = make(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
reports.TestReport.from_item_and_call = classmethod(forged)
""",
    "breaks the report": BUGGY
    + """
import os, sys
path = next(a for a in sys.argv if a.startswith("--junitxml=")).partition("=")[2]
os.mkdir(path)
""",
    "writes a report of its own": BUGGY
    + """
import os, sys
path = next(a for a in sys.argv if a.startswith("--junitxml=")).partition("=")[2]
cases = "".join(f'<testcase classname="tests.test_calc" name="test_{n}"/>' for n in ("two", "three"))
open(path, "w").write(f"<testsuite>{cases}</testsuite>")
os._exit(1)
""",
}


@pytest.fixture(params=["function"])
def substrate(request):
    return request.param


def folder(root, bad="tests.test_calc::test_three"):
    for path, text in {
        "task.yaml": TASK.format(bad=bad),
        "workspace/calc.py": BUGGY,
        "workspace/tests/test_calc.py": "def test_nothing(): pass\n",
        "tests/tests/test_calc.py": TESTS,
        "fixed/calc.py": RIGHT,
    }.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def task(tmp_path, boxes):
    return asyncio.run(prepare(load_folder(folder(tmp_path / "task")), tmp_path / "cache", boxes))


def judged(task, boxes, **files):
    changed = {name.replace("_py", ".py"): text.encode() for name, text in files.items()}
    return asyncio.run(grade(task, Diff(changed), boxes))


def test_a_mend_is_solved_and_the_old_code_is_not(task, boxes, tmp_path):
    assert task.fail_to_pass == ("tests.test_calc::test_three",)
    assert task.pass_to_pass == ("tests.test_calc::test_two",)
    verdict = judged(task, boxes, calc_py=RIGHT)
    assert verdict.solved
    assert verdict.passed == 2
    assert not judged(task, boxes, calc_py=BUGGY + "\n").solved
    assert not judged(task, boxes, calc_py="def double(x):\n    return 6\n").solved  # breaks the other test
    assert not asyncio.run(grade(task, Diff(), boxes)).solved
    kept = list((tmp_path / "cache").glob("accepted-calc-*.json"))
    assert len(kept) == 1
    again = asyncio.run(prepare(load_folder(tmp_path / "task"), tmp_path / "cache", boxes))
    assert again == task


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_that_attacks_the_judge_does_not_pass(task, boxes, attack):
    verdict = judged(task, boxes, calc_py=ATTACKS[attack])
    assert not verdict.solved
    assert "report" in verdict.detail


def test_planted_files_are_not_taken(task, boxes):
    plant = "def pytest_collection_modifyitems(items): items.clear()\n"
    diff = Diff(
        {
            "conftest.py": plant.encode(),
            "sitecustomize.py": b"raise SystemExit(0)",
            "calc.py": BUGGY.encode() + b"#",
        }
        | {"tests/test_calc.py": b"def test_two(): pass\ndef test_three(): pass\n"}
    )
    verdict = asyncio.run(grade(task, diff, boxes))
    assert not verdict.solved
    assert "first failure tests.test_calc::test_three" in verdict.detail


def test_a_task_whose_tests_are_not_as_stated_is_refused(tmp_path, boxes):
    wrong = load_folder(folder(tmp_path / "wrong", bad="tests.test_calc::test_two"))
    with pytest.raises(NotAcceptedError, match=r"fail_to_pass states .*; found "):
        asyncio.run(prepare(wrong, tmp_path / "cache", boxes))


def test_a_verdict_says_what_the_graders_host_lacked(task, boxes):
    async def lacking():
        box = await boxes("any", task.workspace)
        await box.kill()
        return box.shortfalls

    expected = asyncio.run(lacking())
    assert expected
    assert judged(task, boxes, calc_py=RIGHT).shortfalls == expected
    assert judged(task, boxes, calc_py=ATTACKS["leaves early"]).shortfalls == expected
