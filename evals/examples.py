"""The examples that a HumanEval prompt shows, as expressions that can be checked.

Authors wrote them by hand in many forms: `>>> f(1)` with the answer below, `f(1) == 2`, `f(1) ➞ 2`,
`f(1) => true`, `f(1) returns 2`. What cannot be read without guessing is left out. An example is taken as
it stands: in a few problems it contradicts the hidden tests.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evals.problems import Problem
from evals.syntax import parse_expression

_ARROW = re.compile(r"\s*(?:#\s*)?(?:==>|=>|==|=|->|➞|→|returns?\b|is\b)\s*")
_DOCTEST = ">>>"
_MAX_CALL_LINES = 10  # a call that is not closed by then is prose
# Written by authors with other languages in their fingers.
_SPELLINGS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class VisibleExample:
    """`expression` must equal `expected`; both are Python source."""

    expression: str
    expected: str

    @property
    def assertion(self) -> str:
        """One statement that raises AssertionError where the example does not hold."""
        return f"assert ({self.expression}) == ({self.expected}), {self.expression!r}"


def visible_examples(problem: Problem) -> tuple[VisibleExample, ...]:
    """The examples in the prompt, in order, without repetition. Empty where none can be read. Pure."""
    # The source, not the evaluated docstring: there "\n" inside an example would be a broken line.
    source = problem.prompt[problem.prompt.rindex(f"def {problem.entry_point}(") :]
    lines = source.splitlines()[1:]
    found = [*_doctests(lines, problem.entry_point), *_one_liners(lines, problem.entry_point)]
    return tuple(dict.fromkeys(found))


def _doctests(lines: Sequence[str], entry_point: str) -> Iterator[VisibleExample]:
    for index, line in enumerate(lines):
        if not line.strip().startswith(_DOCTEST):
            continue
        call = _parse(line.strip().removeprefix(_DOCTEST))
        if call is None or entry_point not in _names(call):
            continue
        if isinstance(call, ast.Compare):  # the author put the answer on the same line
            yield from _comparison(call)
            continue
        expected = _longest_literal(" ".join(_answer_lines(lines[index + 1 :])), whole=True)
        if expected is None and isinstance(call, ast.Call) and not _answer_lines(lines[index + 1 :]):
            expected = "None"  # the interpreter prints nothing for None
        if expected is not None:
            yield VisibleExample(ast.unparse(call), expected)


def _answer_lines(lines: Sequence[str]) -> list[str]:
    answer: list[str] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith((_DOCTEST, '"""', "'''")):
            break
        answer.append(text)
    return answer


def _comparison(node: ast.Compare) -> Iterator[VisibleExample]:
    if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        yield VisibleExample(ast.unparse(node.left), ast.unparse(node.comparators[0]))


def _one_liners(lines: Sequence[str], entry_point: str) -> Iterator[VisibleExample]:
    for index, line in enumerate(lines):
        start = line.find(f"{entry_point}(")
        if start < 0 or line.strip().startswith(_DOCTEST):
            continue
        text = "\n".join([line[start:], *lines[index + 1 : index + _MAX_CALL_LINES]])
        call_end = _call_end(text)
        arrow = _ARROW.match(text, call_end) if call_end else None
        if not call_end or not arrow or not _is_literal_call(text[:call_end]):
            continue
        expected = _longest_literal(text[arrow.end() :].split("\n")[0], whole=False)
        if expected is not None:
            yield VisibleExample(" ".join(text[:call_end].split("\n")), expected)


def _call_end(text: str) -> int | None:
    """Where the first call in `text` closes: the shortest prefix that is an expression."""
    for match in re.finditer(r"\)", text):
        if _parse(text[: match.end()]) is not None:
            return match.end()
    return None


def _is_literal_call(text: str) -> bool:
    call = _parse(text)
    return isinstance(call, ast.Call) and not call.keywords and all(map(_is_literal, call.args))


def _longest_literal(text: str, *, whole: bool) -> str | None:
    """The longest prefix of `text` that is a value, as source; the whole text where `whole` is set."""
    for end in range(len(text), 0, -1):
        after = text[end : end + 1]
        if after and (after.isalnum() or after in "_\"'."):
            continue  # would cut a word, a string or a number in two
        value = _parse(text[:end])
        if value is not None and _is_literal(value):
            return ast.unparse(value)
        if whole:
            return None
    return None


def _parse(text: str) -> ast.expr | None:
    tree = parse_expression(text)
    return None if tree is None else _Spelling().visit(tree)


class _Spelling(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _SPELLINGS:
            return ast.Constant(_SPELLINGS[node.id])
        return node


def _is_literal(node: ast.expr) -> bool:
    """Constants, containers and arithmetic of them: nothing that a name or a call could change."""
    allowed = (
        ast.Constant,
        ast.List,
        ast.Tuple,
        ast.Dict,
        ast.Set,
        ast.UnaryOp,
        ast.BinOp,
        ast.operator,
        ast.unaryop,
        ast.expr_context,
    )
    return all(isinstance(part, allowed) for part in ast.walk(node))


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
