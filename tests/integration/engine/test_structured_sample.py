"""Structured output from Python, as its page has it."""

import ast
from pathlib import Path

import pytest

import engine

PAGE = Path(__file__).parents[3] / "docs/sampling.md"


def test_the_pages_sample_gives_what_its_schema_says(smollm2_file: Path, capsys: pytest.CaptureFixture[str]):
    (sample,) = (block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:])
    exec(compile(sample, str(PAGE), "exec"), {})
    found = ast.literal_eval(capsys.readouterr().out)
    assert found["colour"] in ("red", "green", "blue")
    assert 0 <= found["count"] <= 999


def test_all_that_the_package_names_is_there():
    assert "Structure" in engine.__all__
    assert all(hasattr(engine, name) for name in engine.__all__)
