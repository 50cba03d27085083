"""Python source that others wrote, parsed without running it and without its warnings in our output."""

import ast
import warnings

# The parser's limits (nesting, null bytes) are among its answers about a text.
_FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError)


def parse_module(source: str) -> ast.Module | None:
    """The tree of a whole program, or None where it is not Python."""
    try:
        return _parse(source)
    except _FAULTS:
        return None


def parse_expression(source: str) -> ast.expr | None:
    """The tree of one expression, or None where the text is not one."""
    tree = parse_module(f"({source.strip()}\n)") if source.strip() else None
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return None
    return tree.body[0].value


def syntax_fault(source: str) -> str:
    """Why a text is not Python, in a few words; "" where it is."""
    try:
        _parse(source)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except _FAULTS as error:
        return f"the parser gives up: {error}"
    return ""


def fault_line(source: str) -> int | None:
    """The line, from 1, at which a text stops being Python; None where it is. 1 where it cannot be told."""
    try:
        _parse(source)
    except SyntaxError as error:
        return max(error.lineno or 1, 1)
    except _FAULTS:
        return 1
    return None


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd escape in a model's string is no fault
        return ast.parse(source)
