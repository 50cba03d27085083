import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidInput
from teams.workspace import (
    MAX_FILE_BYTES,
    Diff,
    Tree,
    WorkspaceError,
    apply_diff,
    checked_path,
    render_diff,
    take_diff,
    within,
)

NAMES = st.sampled_from(["a.py", "b/c.py", "b/d.txt", "e", "tests/test_a.py"])
TREES = st.dictionaries(NAMES, st.binary(max_size=8)).map(Tree)


@given(TREES, TREES)
def test_a_diff_leads_from_one_tree_to_the_other(clean, now):
    assert apply_diff(clean, take_diff(clean, now)).files == now.files


@given(TREES)
def test_a_tree_does_not_differ_from_itself(tree):
    assert not take_diff(tree, tree)


@given(TREES, TREES)
def test_a_rendered_diff_names_every_path(clean, now):
    diff = take_diff(clean, now)
    text = render_diff(clean, diff)
    for path in diff.paths:
        empty = not clean.files.get(path) and not now.files.get(path)  # no line to show
        assert path in text or empty


def test_caches_are_not_part_of_a_diff():
    now = Tree({"a.py": b"", "__pycache__/a.pyc": b"x", ".pytest_cache/v": b"x", "x.pyc": b"x"})
    assert take_diff(Tree({"a.py": b""}), now) == Diff()


def test_links_and_large_files_are_refused():
    with pytest.raises(WorkspaceError, match="leak is not a regular file"):
        take_diff(Tree({}), Tree({}, irregular=("leak",)))
    with pytest.raises(WorkspaceError, match="big has"):
        take_diff(Tree({}), Tree({"big": b"x" * (MAX_FILE_BYTES + 1)}))
    with pytest.raises(WorkspaceError, match="the diff has"):
        take_diff(Tree({}), Tree({f"f{n}": b"x" * MAX_FILE_BYTES for n in range(5)}))


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\x00b", "/workspace/../x"])
def test_paths_that_lead_out_are_refused(path):
    with pytest.raises(InvalidInput, match="not inside the workspace"):
        checked_path(path)


def test_paths_inside_are_made_relative():
    assert checked_path("/workspace/a/b.py") == "a/b.py"
    assert checked_path("./a//b.py") == "a/b.py"
    assert within("h11/tests/x", ["h11/tests"])
    assert not within("h11/tests2/x", ["h11/tests"])
