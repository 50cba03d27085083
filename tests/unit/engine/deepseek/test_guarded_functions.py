"""Models reach products, sums, transcendental functions and selections through engine.numerics alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.numerics import GUARDED

MODELS = Path(__file__).parents[4] / "engine" / "model"
KERNELS = Path(__file__).parents[4] / "kernels"
DOORS = {"numerics", "operations", "ops"}
LIBRARIES = {"torch", "numpy", "scipy"}
ALLOWED = {
    "deepseek/hyper_connections.py": {"reduce"},  # fewer than eight terms, which NumPy adds one by one
    "deepseek/vision.py": {"erf"},  # of an image by itself, whose number of places is its own
    "deepseek/dspark.py": {"argmax"},  # NumPy's, whose ties go to the lowest
    "deepseek_v4/compressor.py": {"norm"},  # a field, RmsNorm
}


def _offences(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """What a file does that GUARDED, or a module with weights of its own, stands for."""
    tree = ast.parse(source)
    return [f"line {line}: {what}" for line, name, what in _found(tree) if name not in allowed]


def _found(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                yield node.lineno, "@", f"@, use {GUARDED['matmul']}"
            case ast.Attribute(attr=name) if name in GUARDED and _owner(node) not in DOORS:
                yield node.lineno, name, f"{name}, use {GUARDED[name]}"
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if (
                name in GUARDED
            ):
                yield node.lineno, name, f"{name}, use {GUARDED[name]}"
            case ast.Call(func=ast.Attribute(attr="sort" | "argsort" | "msort" as name)) if (
                node.args or node.keywords
            ) and not _is_stable(node):
                yield node.lineno, name, f"{name} whose ties go anywhere, say stable=True"
            case ast.Call(func=ast.Attribute(attr=name)) if _adds_up(node, name):
                yield node.lineno, name, f"{name} that adds up, use {GUARDED['scatter_add']}"
            case ast.Attribute(attr="at") if isinstance(node.value, ast.Attribute):
                yield node.lineno, "at", f"at, use {GUARDED['scatter_add']}"
            case ast.Attribute(attr=name) if _owner(node) == "nn" and name != "functional":
                yield node.lineno, name, f"nn.{name}, a module of torch's"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LIBRARIES:
                yield from _imported(node, module)
            case ast.Import():
                named = [alias.name for alias in node.names if alias.name.startswith("torch.nn")]
                yield from ((node.lineno, name, f"import {name}") for name in named)
            case _:
                pass


def _is_stable(call: ast.Call) -> bool:
    return any(k.arg in {"stable", "kind", "key"} for k in call.keywords)


def _adds_up(call: ast.Call, name: str) -> bool:
    """A scatter that combines what meets in one place."""
    named = {k.arg for k in call.keywords}
    return (name in {"scatter", "scatter_"} and "reduce" in named) or (
        name in {"index_put", "index_put_", "put_"} and ("accumulate" in named or len(call.args) > 2)
    )


def _owner(node: ast.Attribute) -> str:
    """The name right before the dot: of a variable, or of an attribute."""
    return node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")


def _imported(node: ast.ImportFrom, module: str) -> Iterator[tuple[int, str, str]]:
    for name in (alias.name for alias in node.names):
        of_modules = module.startswith("torch.nn") and name != "functional"
        if name in GUARDED or name == "*" or of_modules or (module, name) == ("torch", "nn"):
            yield node.lineno, name, f"{name} of {module}, use {GUARDED.get(name, 'engine.numerics')}"


def test_no_model_calls_them_directly():
    sources = {str(path.relative_to(MODELS)): path.read_text() for path in sorted(MODELS.rglob("*.py"))}
    assert len(sources) > 20
    found = {name: _offences(text, frozenset(ALLOWED.get(name, ()))) for name, text in sources.items()}
    assert not {name: offences for name, offences in found.items() if offences}
    for name, allowed in ALLOWED.items():
        assert all(_offences(sources[name], frozenset(allowed - {one})) for one in allowed), (
            "no longer needed"
        )


KERNELS_ALLOWED = {
    "torch_operations.py": {"@", "silu"},  # tiles of rows, on one thread where it would be cut; whole vectors
    "integer_product.py": {"@", "sum"},  # whole numbers, which no order changes
    "paged_attention.py": {"einsum", "softmax"},  # of a row by itself
    "reductions.py": {"mean"},
    "rms_norm.py": set(),
    "decoder.py": {"rms_norm"},  # of operations
}


@pytest.mark.parametrize("name", KERNELS_ALLOWED)
def test_no_operation_of_pytorch_calls_them_unseen(name):
    source = (KERNELS / name).read_text()
    assert not _offences(source, frozenset(KERNELS_ALLOWED[name]))


@pytest.mark.parametrize("line", [
    "F.linear(x, w)", "x @ w", "x @= w", "x.softmax(-1)", "torch.bmm(a, b)", "torch.topk(x, 3)",
    "f = torch.bmm", "f = x.matmul", "map(torch.mv, a, b)", "from torch import bmm",
    "from torch import bmm as b", "from torch import *", "from torch.nn.functional import gelu",
    "F.gelu(x)", "F.log_softmax(x, -1)",
    "x.logsumexp(-1)", "x.cumsum(1)", "x.sum(-1)", "(a * b).sum(-1, keepdim=True)", "torch.sum(x, 1)",
    "torch.tensordot(a, b)", "torch.inner(a, b)", "a.dot(b)", "torch.addbmm(m, a, b)", "x.tanh()",
    "torch.ops.aten.bmm(a, b)", "nn.Linear(3, 4)", "torch.nn.Linear(3, 4)", "from torch import nn",
    "from torch.nn import Linear", "import torch.nn as layers", "np.dot(a, b)", "np.einsum('ij,jk', a, b)",
    "from numpy import matmul", "np.add.reduce(x)", "x.mean(1)", "F.layer_norm(x, (3,))",
    "x.addmm_(a, b)", "x.addmv_(a, b)", "x.baddbmm_(a, b)", "x.scatter_reduce_(0, i, y, 'sum')",
    "x.scatter_(0, i, y, reduce='add')", "x.index_put_((i,), y, accumulate=True)",
    "x.index_put_((i,), y, True)",
    "torch.var_mean(x)", "x.__matmul__(y)", "getattr(x, 'sum')(1)", "np.add.at(x, i, y)",
    "np.add.accumulate(x)", "np.average(x)", "F.cosine_similarity(x, y)", "F.embedding_bag(i, w)",
    "x.sort(1)", "x.argsort(dim=1)", "torch.argsort(x)", "x.cumprod_(1)", "torch.fft.rfft(x)",
    "x.index_add_(0, i, y)", "self.weight.mv(x)", "x.argmax(1)",
])  # fmt: skip
def test_what_goes_round_them_is_found(line):
    assert _offences(line)


@pytest.mark.parametrize("line", [
    "numerics.linear(ops, x, w) + ops.linear(x, w)", "step.operations.linear(x, [w])", "numerics.row_sum(x)",
    "sum(counts)", "from torch.nn import functional as F", "from engine.numerics import softmax",
    "F.pad(x, (0, 1))", "x.argsort(stable=True)", "names.sort()", "x.scatter_(0, i, y)", "getattr(x, 'rows')",
     "x.exp().log1p()", "self.operations.rms_norm(x, w, eps)",
])  # fmt: skip
def test_what_goes_through_them_is_not(line):
    assert not _offences(line)
