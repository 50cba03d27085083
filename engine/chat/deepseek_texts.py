"""The texts of the prompt that must be the release's to the byte: the effort line and the tools block.

A checkpoint carries them in `encoding/*.py`, as constants of a program; they are read from its syntax tree,
and no line of it runs. Without that folder a wording of ours stands in: it has the same form, but the model
was not trained on it. Source: fact sheet, section 10.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Literal

from engine.errors import BrokenModelFile

Family = Literal["v41", "v4"]

EFFORTS = {"low": 50, "high": 75, "max": 100}
_FIELDS = {
    "effort": {"budget"},
    "tools": {"dsml_token", "thinking_start_token", "thinking_end_token", "tool_schemas"},
    "response_format": {"schema"},
}
_CONSTANTS = {
    "effort": "REASONING_EFFORT_TEMPLATE",
    "effort_low": "REASONING_EFFORT_LOW",
    "effort_high": "REASONING_EFFORT_HIGH",
    "effort_max": "REASONING_EFFORT_MAX",
    "tools": "TOOLS_TEMPLATE",
    "response_format": "RESPONSE_FORMAT_TEMPLATE",
}
_REQUIRED: Mapping[Family, Sequence[str]] = {"v41": ("effort", "tools"), "v4": ("effort_max", "tools")}


@dataclass(frozen=True, slots=True)
class ChatTexts:
    """Templates with `{field}`s. V4.1 has one effort line with `{budget}`, V4 a sentence for each level."""

    family: Family
    texts: Mapping[str, str]
    of_release: bool  # False: the wording is ours

    def effort(self, effort: int) -> str:
        """The template of the effort line: V4's is that of the nearest named level."""
        if self.family == "v41":
            return self.texts["effort"]
        level = min(EFFORTS, key=lambda name: abs(EFFORTS[name] - effort))
        return self.texts.get(f"effort_{level}", "")


def load_texts(family: Family, checkpoint: Path | None = None) -> ChatTexts:
    """The checkpoint's texts, or ours where it carries none.

    Raises BrokenModelFile where its `encoding` folder does not hold what it should.
    """
    if checkpoint is not None and (folder := checkpoint / "encoding").is_dir():
        return _release_texts(family, folder)
    ours = resources.files("engine.chat").joinpath("deepseek_texts.json").read_text("utf-8")
    return ChatTexts(family, json.loads(ours)[family], of_release=False)


def _release_texts(family: Family, folder: Path) -> ChatTexts:
    constants = _constants(folder)
    texts = {name: constants[c] for name, c in _CONSTANTS.items() if c in constants}
    for name in _REQUIRED[family]:
        if name not in texts:
            raise BrokenModelFile(
                f"{folder}: no constant {_CONSTANTS[name]!r} in its Python files",
                hint="take the folder from the model's release, or leave it out",
            )
    for name, text in texts.items():
        _check_fields(folder, name, text)
    return ChatTexts(family, texts, of_release=True)


def _constants(folder: Path) -> dict[str, str]:
    """The strings that the folder's programs assign, by upper-case name."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BrokenModelFile(f"{path}: not a Python file ({error})") from error
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                _keep_string(node, node.value, found)
    return found


def _keep_string(node: ast.Assign | ast.AnnAssign, value: ast.expr, found: dict[str, str]) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    with suppress(ValueError, TypeError):  # what is no literal is no text of ours
        text: object = ast.literal_eval(value)
        if isinstance(text, str):
            found.update((t.id.upper(), text) for t in targets if isinstance(t, ast.Name))


def _check_fields(folder: Path, name: str, text: str) -> None:
    allowed = _FIELDS[name.partition("_")[0] if name.startswith("effort") else name]
    try:
        fields = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise BrokenModelFile(f"{folder}: {_CONSTANTS[name]}: {error}") from error
    if unknown := fields - allowed:
        raise BrokenModelFile(
            f"{folder}: {_CONSTANTS[name]} has a field {min(unknown)!r}, known: {', '.join(sorted(allowed))}"
        )
