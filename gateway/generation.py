"""What a request of any route amounts to for the workers."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.chat.form import PlainReader, ReplyReader
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, with one set of sampling parameters a choice; `reader` makes what reads a choice's text."""

    prompt_ids: tuple[int, ...]
    choices: tuple[SamplingParams, ...]
    priority: int = 0
    arrived_ns: int = 0  # when the gateway had its body; 0: when it is sent on
    first_choice: int = 0  # the number of its first choice in the reply
    reader: Callable[[], ReplyReader] = PlainReader
    names_tool: bool = False  # the request has said which tool: the finish reason is then not `tool_calls`
    cache_salt: str = ""  # cached prefixes are shared with requests of the same salt alone
    slack_ms: float = 0.0  # how much later it may start without holding anyone up
    # Of a stream that goes on: the tokens that another request has given out, and where windows were run
    # again there.
    generated_ids: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    tells_ids: bool = False  # the reply has the ids of tokens beside their text


@dataclass(frozen=True, slots=True)
class Asked:
    """One body: what it wants generated, and how the reply comes."""

    generations: tuple[Generation, ...]
    stream: bool
    include_usage: bool

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(generation.prompt_ids) for generation in self.generations)

    @property
    def num_choices(self) -> int:
        return sum(len(generation.choices) for generation in self.generations)
