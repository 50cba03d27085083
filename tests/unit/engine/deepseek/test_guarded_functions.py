"""Models reach products, transcendental functions and selections through engine.numerics alone."""

import ast
from pathlib import Path

from engine.numerics import GUARDED

MODELS = Path(__file__).parents[4] / "engine" / "model"
DOORS = {"numerics", "operations", "ops"}


def _offences(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(f"line {node.lineno}: @, use {GUARDED['matmul']}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GUARDED:
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name not in DOORS:
                found.append(f"line {node.lineno}: {node.func.attr}, use {GUARDED[node.func.attr]}")
    return found


def test_no_model_calls_them_directly():
    sources = sorted(MODELS.rglob("*.py"))
    assert len(sources) > 20
    offences = {str(p.relative_to(MODELS)): found for p in sources if (found := _offences(p.read_text()))}
    assert not offences


def test_a_direct_call_is_found():
    for call in ("F.linear(x, w)", "x @ w", "x.softmax(-1)", "torch.bmm(a, b)", "x @= w", "torch.topk(x, 3)"):
        assert _offences(call), call
    assert not _offences("numerics.linear(ops, x, w) + ops.linear(x, w)")
