"""From a model's reply to the program that is graded.

A reply is prose with fenced code, bare code, or the mere body of the function; small models leave out
imports, add calls that print, and stop in the middle of a block. The program keeps what defines things.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from evals.problems import Problem
from evals.syntax import fault_line, parse_module, syntax_fault

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)", re.MULTILINE | re.DOTALL)
_CODE_START = re.compile(r"^(?:def |async def |class |from \w|import |@\w)", re.MULTILINE)
# Longer replies are cut: no solution is as long, and the host's parser need not meet more.
MAX_REPLY_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class Extraction:
    """What a reply holds. `program` is complete Python source where `fault` is None, and "" otherwise."""

    program: str
    fault: Literal["no_code", "syntax"] | None
    detail: str = ""


def extract_program(reply: str, problem: Problem) -> Extraction:
    """The program in a reply, with the prompt's imports and helpers in front. Pure; never runs any of it.

    Of several blocks the first that defines the function is taken, together with what the other blocks
    define; a block that is only a body completes the prompt. Calls and assertions at the top level are
    dropped: they are usage examples, and a wrong one would fail a right function.
    """
    candidates = list(_candidates(reply[:MAX_REPLY_CHARS], problem))
    if not candidates:
        return Extraction("", "no_code", "the reply holds no Python code")
    for source in candidates:
        tree = parse_module(source)
        if tree is not None and problem.entry_point in _defined(tree):
            return Extraction(f"{problem.preamble.rstrip()}\n\n{_definitions(tree, source)}".lstrip(), None)
    if any(f"def {problem.entry_point}" in source for source in candidates):
        return Extraction("", "syntax", syntax_fault(candidates[-1]))
    return Extraction("", "no_code", f"no code in the reply defines {problem.entry_point}")


def _candidates(reply: str, problem: Problem) -> Iterator[str]:
    """Sources that may be the program, likeliest first."""
    blocks = [_dedent(block) for block in _FENCE.findall(reply) if block.strip()]
    if not blocks:
        start = _CODE_START.search(reply)
        blocks = [_longest_program(reply[start.start() :])] if start else []
    defining = [block for block in blocks if f"def {problem.entry_point}" in block]
    support = "\n\n".join(_support(block) for block in blocks if block not in defining)
    for block in defining:
        yield f"{support}\n\n{_longest_program(block)}".lstrip()
    if not defining:
        for body in blocks or [reply]:
            yield from _completions(body, problem)


def _support(block: str) -> str:
    """What a block besides the chosen one brings: imports and definitions, no statements that use them."""
    tree = parse_module(block)
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, kinds)) if tree else ""


def _completions(body: str, problem: Problem) -> Iterator[str]:
    """The prompt continued by a body, at the indentation it has or at the one it needs."""
    head = problem.prompt[len(problem.preamble) :].rstrip()
    indented = "\n".join(f"    {line}" if line.strip() else "" for line in body.splitlines())
    for text in (body.strip("\n"), indented):
        source = f"{head}\n{text}\n"
        if text.startswith((" ", "\t")) and _returns(source):
            yield source


def _returns(source: str) -> bool:
    """Whether the one function of `source` returns something itself, not in a function inside it.

    Prose behind a docstring, or another function indented into it, must not pass for a body.
    """
    tree = parse_module(source)
    if tree is None or not isinstance(tree.body[0], ast.FunctionDef):
        return False
    pending: list[ast.AST] = list(tree.body[0].body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return False


_MAX_CUTS = 32  # each parses the text again, and a text that faults at every line would need them all


def _longest_program(text: str) -> str:
    """`text` without the end that keeps it from being Python: prose after code, a block cut at its limit.

    Cuts only before a line at the margin. A function that is itself broken stays broken.
    """
    lines = text.splitlines()
    end = len(lines)
    for _ in range(_MAX_CUTS):
        if end <= 0:
            return text
        fault = fault_line("\n".join(lines[:end]))
        if fault is None:
            return "\n".join(lines[:end])
        # What lies before the fault parsed so far: no longer prefix can help, so most texts cost few tries.
        end = min(end, fault) - 1
        while end > 0 and not lines[end][:1].strip():
            end -= 1
    return _searched_program(lines[:end]) or text


def _searched_program(lines: list[str]) -> str:
    """The longest prefix that is Python, taking it that the shorter ones are too: code, then faults."""
    ends = [0, *(n for n in range(1, len(lines)) if lines[n][:1].strip()), len(lines)]
    good, bad = 0, len(ends)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fault_line("\n".join(lines[: ends[middle]])) is None:
            good = middle
        else:
            bad = middle
    return "\n".join(lines[: ends[good]])


def _dedent(block: str) -> str:
    """A block inside a list item is indented as a whole; a body is too, and stays so.

    Only a block whose first line opens a definition is moved to the margin.
    """
    first = next(line for line in block.splitlines() if line.strip())
    indent = first[: len(first) - len(first.lstrip())]
    if not indent or not _CODE_START.match(first.lstrip()):
        return block
    return "\n".join(line.removeprefix(indent) for line in block.splitlines())


def _defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _definitions(tree: ast.Module, source: str) -> str:
    """`source` without the top-level statements that only do something; comments stay."""
    dropped: set[int] = set()
    kept: set[int] = set()
    for node in tree.body:
        span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        (dropped if _only_acts(node) else kept).update(span)
    lines = source.splitlines()
    text = "\n".join(line for number, line in enumerate(lines, 1) if number not in dropped - kept)
    return f"{text.strip()}\n"


def _only_acts(node: ast.stmt) -> bool:
    main_guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    return isinstance(node, ast.Expr | ast.Assert) or main_guard
