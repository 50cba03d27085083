"""Prompts that share their starts: instructions, tools, a tool's result and source code."""

import json
import random
from dataclasses import dataclass

from engine.chat.tokenizer import ChatTokenizer
from engine.training.corpus import standard_library

SHORT = (16, 31, 48, 77, 130, 200, 260, 330)
LONGEST = 4_000
BLOCK = 16  # positions of a block of the models that are compared
_TOOLS = tuple(
    {
        "name": name,
        "description": text,
        "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
    }
    for name, text, key in (
        ("read_file", "Read a file of the workspace.", "path"),
        ("run_command", "Run a shell command and return its output.", "command"),
        ("search", "Search the workspace for a pattern.", "pattern"),
    )
)
_INSTRUCTIONS = (
    "You repair Python programs. Change as little as possible and run the tests after each change.\n"
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_known(self) -> int:
        """Positions of the whole blocks that it can use when it comes again: its last row runs."""
        return (self.length - 1) // BLOCK * BLOCK


def cases(tokenizer: ChatTokenizer, lengths: tuple[int, ...]) -> list[Case]:
    """One a length. Half of each is the start of one of three texts, the rest is its own."""
    files = [file.text for file in standard_library().held_out if file.text]
    order = random.Random(5).sample(range(len(files)), len(files))
    tools = _INSTRUCTIONS + json.dumps({"tools": _TOOLS}) + "\n"
    starts = [
        tokenizer.encode(text) for text in (tools, tools + "Begin.\n" + files[order[0]], files[order[1]])
    ]
    found: list[Case] = []
    for number, length in enumerate(lengths):
        ids = list(starts[number % len(starts)][: length // 2])
        place = number + 2
        while len(ids) < length:
            result = f'<tool name="read_file">{files[order[place % len(order)]]}</tool>\n'
            ids += tokenizer.encode(result)
            place += 1
        found.append(Case(f"{number:02d}-{length}", tuple(ids[:length])))
    return found


def spread(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from 16 to `longest`, a constant factor apart."""
    factor = (longest / 16) ** (1 / (count - 1))
    return tuple(round(16 * factor**number) for number in range(count))
