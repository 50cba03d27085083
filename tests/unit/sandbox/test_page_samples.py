"""The pages' samples say where what they use comes from."""

import ast
from pathlib import Path

import pytest

import sandbox

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/sandbox.md", "docs/egress.md", "docs/sandbox-errors.md"])
def test_what_a_page_uses_of_the_sdk_it_has_imported_by_then(page: str) -> None:
    known = set[str]()
    for block in (REPOSITORY / page).read_text().split("```python\n")[1:]:
        tree = ast.parse(block.split("```")[0])
        compile(tree, page, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= {each.asname or each.name for each in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used & {*sandbox.__all__, "presets", "audit"} <= known, page
