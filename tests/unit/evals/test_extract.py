import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.extract import extract_program
from evals.problems import Problem, load_problems

PROBLEM = Problem("t/0", "f", 'import math\n\n\ndef f(x):\n    """Square it."""\n', "    return x * x\n", "")


def run(reply):
    extraction = extract_program(reply, PROBLEM)
    assert extraction.fault is None, extraction
    space = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the programs are not ours
        exec(extraction.program, space)
    return space["f"](3)


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef f(x):\n    return x * x\n```",
        "Sure, here it is:\n\n```\ndef f(x):\n    return x * x\n```\nIt squares.",
        "~~~py\ndef f(x):\n    return x * x\n~~~",
        "```python\ndef f(x):\n    return x * x\n",  # cut before the fence closes
        "def f(x):\n    return x * x",
        "The answer:\ndef f(x):\n    return x * x\n\nThis squares x, isn't it nice?",
        "    return x * x\n",
        "```python\n    return x * x\n```",
        "```python\nreturn x * x\n```",
        "```python\ndef f(x):\n    return x * x\n\n\ndef test_f():\n    assert f(",  # cut after the function
        "1. Do this:\n   ```python\n   def f(x):\n       return x * x\n   ```\n",
        "```python\ndef f(x):\n    return math.floor(x * x)\n```",  # relies on the prompt's import
        "```python\ndef g(x):\n    return x\n```\nthen\n```python\ndef f(x):\n    return g(x) * x\n```",
        "```python\ndef f(x):\n    return x * x\n```\nUse it:\n```python\nprint(f('a'))\n```",
        "```python\nresult = f(3)\n```\n```python\ndef f(x):\n    return x * x\n```",
        "```python\ndef f(x):\n    return x * x\n\nassert f(2) == 5\nprint(f())\n```",
        "```python\ndef f(x):\n    return x * x\n\nif __name__ == '__main__':\n    f()\n```",
        "```bash\npip install x\n```\n```python\ndef f(x):\n    return x * x\n```",
        "```python\ndef f(x)\n    return\n```\nSorry, fixed:\n```python\ndef f(x):\n    return x * x\n```",
        "```python\ndef f(x):\n    return x * x if '\\d' else 0\n```",  # an odd escape warns, no more
    ],
)
def test_the_program_is_found(reply):
    assert run(reply) == 9


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("", "no_code"),
        ("I cannot do that.", "no_code"),
        ("Square x and return the result.", "no_code"),
        ("```python\ndef other(x):\n    return 1\n```", "no_code"),
        ("```python\ndef f(x):\n    return (x\n```", "syntax"),
        ("```python\ndef f(x):\n    y = x\n    return (y", "syntax"),  # cut within the function
        ("```python\ndef f(x):\n    return 'a\x00'\n```", "syntax"),
    ],
)
def test_faults_are_told_apart(reply, fault):
    extraction = extract_program(reply, PROBLEM)
    assert (extraction.fault, extraction.program) == (fault, "")
    assert extraction.detail


def test_first_whole_definition_wins():
    reply = "```python\ndef f(x):\n    return 9\n```\nor\n```python\ndef f(x):\n    return 0\n```"
    assert run(reply) == 9


def test_comments_stay():
    reply = "```python\n# why\ndef f(x):\n    return x  # because\n```"
    program = extract_program(reply, PROBLEM).program
    assert "# why" in program
    assert "# because" in program


def test_canonical_solutions_survive_every_form():
    for problem in load_problems():
        whole = problem.prompt + problem.canonical_solution
        for reply in (f"Here:\n```python\n{whole}```\n", f"```python\n{problem.canonical_solution}\n```"):
            space = {}
            exec(extract_program(reply, problem).program, space)
            exec(problem.test, space)
            space["check"](space[problem.entry_point])


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.sampled_from("`~\n def(x):=+return f'\"\\\t#[]1"), max_size=80))
def test_no_reply_raises(reply):
    extraction = extract_program(reply, PROBLEM)
    assert (extraction.program == "") == (extraction.fault is not None)


def test_a_long_reply_of_prose_costs_few_parses():
    code = "def f(x):\n    return x * x\n"
    assert run(code + "and so it goes on, line by line\n" * 3_000) == 9
    assert run(code + "x = (\n" * 3_000) == 9


def test_a_reply_that_faults_at_each_line_costs_few_parses():
    """Each `@x` is a decorator without a function, so every cut moves the fault by one line."""
    extract_program("@x\n" * 30_000, PROBLEM)
