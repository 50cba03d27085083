import pytest

from evals.examples import VisibleExample, visible_examples
from evals.problems import Problem, load_problems

# Examples that the benchmark's own solution does not satisfy: mistakes of its authors, kept as they stand.
CONTRADICTED = {"HumanEval/47", "HumanEval/116", "HumanEval/130", "HumanEval/148"}


def problem_with(*docstring_lines):
    body = "\n".join(f"    {line}" for line in docstring_lines)
    return Problem("t/0", "f", f'def f(x):\n    """Text.\n{body}\n    """\n', "", "")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([">>> f(1)", "2"], ("f(1)", "2")),
        ([">>> f([])", ""], ("f([])", "None")),
        ([">>> f(1) == 2"], ("f(1)", "2")),
        ([">>> round(f(1), 2) # why", "0.5"], ("round(f(1), 2)", "0.5")),
        ([">>> f(1)", "['a',", " 'b']"], ("f(1)", "['a', 'b']")),
        (["f(1) == 2"], ("f(1)", "2")),
        (["* f(1) ➞ [2]"], ("f(1)", "[2]")),
        (["f(1) => true"], ("f(1)", "True")),
        (["f(1) ==> False # since"], ("f(1)", "False")),
        (["f(1)->3 - 1 = 2"], ("f(1)", "3 - 1")),
        (["f('a') returns 'b'"], ("f('a')", "'b'")),
        (["f('a)') # => 'b' (odd)"], ("f('a)')", "'b'")),
        (["f([", "  [1],", "]) == 2"], ("f([       [1],     ])", "2")),
        (["f(1) == 6.00"], ("f(1)", "6.0")),
    ],
)
def test_forms(lines, expected):
    assert visible_examples(problem_with(*lines)) == (VisibleExample(*expected),)


@pytest.mark.parametrize(
    "line",
    [
        "f(a) => True",  # a name, not a value
        "f(1) is large",
        'f(1) == ""two"',  # the author's quotes do not close
        "call f(1) and see",
        "g(1) == 2",
        "f(x) == x",
        ">>> f([1,\"2'])",
    ],
)
def test_what_cannot_be_read_is_left_out(line):
    assert visible_examples(problem_with(line)) == ()


def test_repetition_counts_once():
    assert len(visible_examples(problem_with("f(1) == 2", "f(1) == 2"))) == 1


def test_assertion_names_the_call():
    with pytest.raises(AssertionError, match=r"f\(1\)"):
        exec(VisibleExample("f(1)", "2").assertion, {"f": lambda x: x})


def test_examples_of_the_whole_benchmark():
    found = {problem: visible_examples(problem) for problem in load_problems()}
    assert sum(bool(examples) for examples in found.values()) >= 139
    assert sum(len(examples) for examples in found.values()) >= 396
    wrong = set()
    for problem, examples in found.items():
        space = {}
        exec(problem.prompt + problem.canonical_solution, space)
        for example in examples:
            call, expected = eval(example.expression, space), eval(example.expected, space)
            if call != expected:
                wrong.add(problem.task_id)
    assert wrong == CONTRADICTED
