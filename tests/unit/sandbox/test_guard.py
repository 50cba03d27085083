"""The node's guard where the kernel does not have it, and the words for what it refuses. Where it has it:
tests/vm."""

import pytest

from sandbox.guard import node
from sandbox.refusals import Attempt, denials_since


@pytest.fixture(autouse=True)
def unattempted():
    node._attempt.cache_clear()
    yield
    node._attempt.cache_clear()


def test_a_kernel_that_does_not_ask_it_is_named(monkeypatch):
    monkeypatch.setattr(node, "_is_active", lambda: False)
    assert node.shared_guard() is None
    assert node.missing() == "the kernel was booted without `bpf` in its `lsm=` list"


def test_programs_that_are_not_built_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(node, "_is_active", lambda: True)
    monkeypatch.setattr(node, "GUARD_OBJECT", tmp_path / "none.o")
    assert node.shared_guard() is None
    assert "python -m sandbox.guard.build" in node.missing()


def test_what_it_refuses_is_a_denial_in_words():
    before, now = {Attempt("mount"): 1}, {Attempt("mount"): 3, Attempt("module"): 1}
    assert [(each.limit, each.count, each.detail) for each in denials_since(before, now)] == [
        ("guard", 2, "mounting was refused 2 times"),
        ("guard", 1, "having the kernel load a module was refused once"),
    ]
