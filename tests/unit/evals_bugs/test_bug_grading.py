import pytest

from evals.bugs import BugTask, NotAcceptedError, gradable, load_folder
from evals.bugs.accept import judged
from evals.bugs.hidden_tests import ReportError, TestRun, _Canary, read_report
from evals.bugs.recipe import Layout
from protocol.errors import InvalidInput
from teams.workspace import Diff, Tree

LAYOUT = Layout(source=("pkg",), tests=("pkg/tests",))
TASK = BugTask("toy", "mend", "MIT", LAYOUT, Tree({}), Tree({}), None, ("t::bad",), ("t::good",))


def folder(
    root, *, task="name: toy\ninstruction: mend\nsource: [app.py]\ntests: [tests]\nfail_to_pass: [a::b]\n"
):
    (root / "workspace").mkdir(parents=True)
    (root / "workspace" / "app.py").write_text("x = 1\n")
    (root / "tests" / "tests").mkdir(parents=True)
    (root / "tests" / "tests" / "test_app.py").write_text("def test_x(): pass\n")
    (root / "task.yaml").write_text(task)
    return root


def test_a_task_folder_is_loaded(tmp_path):
    task = load_folder(folder(tmp_path))
    assert task.workspace.files == {"app.py": b"x = 1\n"}
    assert set(task.hidden.files) == {"tests/test_app.py"}
    assert task.fixed is None


def test_a_task_folder_without_tests_is_named(tmp_path):
    root = folder(tmp_path / "mine")
    (root / "tests" / "tests" / "test_app.py").unlink()
    with pytest.raises(InvalidInput, match=r"mine has no tests .*tests/tests"):
        load_folder(root)
    (root / "tests" / "tests").rmdir()
    (root / "tests").rmdir()
    with pytest.raises(InvalidInput, match="mine has no tests"):
        load_folder(root)


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        ("name: toy\nsource: [a]\ntests: [t]\n", "instruction: Field required"),
        ("[1\n", "not valid YAML"),
        (
            "name: toy\ninstruction: m\nsource: [../x]\ntests: [t]\nfail_to_pass: [a]\n",
            "inside the source tree",
        ),
    ],
)
def test_a_task_file_that_does_not_fit_is_refused(tmp_path, task, advice):
    with pytest.raises(InvalidInput, match=advice):
        load_folder(folder(tmp_path, task=task))


def test_links_in_a_task_folder_are_not_followed(tmp_path):
    root = folder(tmp_path)
    (root / "workspace" / "leak").symlink_to("/etc/passwd")
    task = load_folder(root)
    assert task.workspace.irregular == ("leak",)
    assert "leak" not in task.workspace.files


def test_only_the_source_of_a_diff_is_graded():
    diff = Diff(
        {
            "pkg/a.py": b"1",
            "pkg/tests/test_a.py": b"1",
            "pkg/conftest.py": b"1",
            "pkg/sitecustomize.py": b"1",
            "pkg/x.pth": b"1",
            "pkg/_pytest/main.py": b"1",
            "conftest.py": b"1",
            "pytest.ini": b"1",
            "setup.cfg": b"1",
            "pkgs/a.py": b"1",
        },
        removed=("pkg/b.py", "pkg/tests/test_b.py", "pyproject.toml"),
    )
    assert gradable(TASK, diff) == Diff({"pkg/a.py": b"1"}, ("pkg/b.py",))


REPORT = b"""<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="t" name="ok"/>
<testcase classname="t" name="bad"><failure message="x"/></testcase>
<testcase classname="t" name="broken"><error message="x"/></testcase>
<testcase classname="t" name="off"><skipped/></testcase>
<testcase classname="t" name="torn"/><testcase classname="t" name="torn"><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read():
    assert read_report(REPORT) == {
        "t::ok": "passed",
        "t::bad": "failed",
        "t::broken": "failed",
        "t::off": "skipped",
        "t::torn": "failed",
    }


@pytest.mark.parametrize("data", [b"", b"<a", b"<!DOCTYPE a><a/>", b'<!ENTITY b "c"><a/>', b"x" * 20_000_000])
def test_what_is_no_report_is_refused(data):
    with pytest.raises(ReportError):
        read_report(data)


BOMB = '<!DOCTYPE a [<!ENTITY b "c">]><testsuites><testcase classname="t" name="&b;"/></testsuites>'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-7", "cp037"])
def test_entities_are_refused_in_every_encoding(encoding):
    for declaration in ("", f'<?xml version="1.0" encoding="{encoding}"?>'):
        with pytest.raises(ReportError):
            read_report((declaration + BOMB).encode(encoding))


@pytest.mark.parametrize("name", ["utf-7", "UTF-16", "latin-1", ""])
def test_a_declared_encoding_other_than_utf_8_is_refused(name):
    with pytest.raises(ReportError, match="another encoding"):
        read_report(f"<?xml version='1.0' encoding = '{name}'?><testsuites/>".encode())


def test_the_declaration_that_pytest_writes_is_taken():
    assert read_report(b'<?xml version="1.0" encoding="utf-8"?>' + REPORT[21:])["t::ok"] == "passed"


def test_a_report_in_which_everything_passes_is_not_believed():
    canary = _Canary("ab", "tests")
    good, bad = f"tests.test_ab::{canary._good}", f"tests.test_ab::{canary._bad}"
    honest = {"t::a": "passed", good: "passed", bad: "failed"}
    assert canary.checked(honest, 1) == {"t::a": "passed"}
    for states, exit_code in [
        ({**honest, bad: "passed"}, 0),
        ({**honest, bad: "passed"}, 1),
        ({"t::a": "passed"}, 1),
        (honest, 0),
        (honest, 3),
        (honest, None),
        ({**honest, good: "failed"}, 1),
    ]:
        with pytest.raises(ReportError, match="cannot be trusted"):
            canary.checked(states, exit_code)


def run_of(**states):
    return TestRun({f"t::{name}": state for name, state in states.items()}, "")


def promised(count=20, fail_to_pass=("t::bug",)):
    return BugTask("toy", "m", "MIT", LAYOUT, Tree({}), Tree({}), Tree({}), fail_to_pass, (), count)


STEADY = {f"s{n}": "passed" for n in range(20)}


def test_a_task_that_tells_old_from_new_is_accepted():
    accepted = judged(promised(), run_of(bug="failed", **STEADY), run_of(bug="passed", **STEADY))
    assert accepted.fail_to_pass == ("t::bug",)
    assert len(accepted.pass_to_pass) == 20


@pytest.mark.parametrize(
    ("task", "old", "new", "rule"),
    [
        (promised(), {"bug": "passed"}, {"bug": "passed"}, "no test fails on the old"),
        (promised(), {"bug": "failed"}, {"bug": "failed"}, "no test fails on the old"),
        (promised(fail_to_pass=("t::other",)), {}, {"bug": "passed"}, "states t::other; found t::bug"),
        (promised(21), {}, {"bug": "passed"}, "stated 21"),
        (promised(19), {"s0": "failed"}, {"bug": "passed", "s0": "failed"}, "only 19"),
    ],
)
def test_a_task_that_does_not_is_refused_by_its_rule(task, old, new, rule):
    with pytest.raises(NotAcceptedError, match=rule):
        judged(task, run_of(**{**STEADY, **old}), run_of(**{**STEADY, **new}))


def test_an_id_with_a_clock_in_it_is_refused():
    states = {**STEADY, "at[2025-01-01T10:00:00]": "passed"}
    with pytest.raises(NotAcceptedError, match="holds a clock"):
        judged(promised(21), run_of(bug="failed", **states), run_of(bug="passed", **states))
