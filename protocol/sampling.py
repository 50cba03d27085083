"""How a request's next tokens are chosen; crosses the wire from the gateway to the engines."""

from dataclasses import dataclass
from typing import Literal

StructureKind = Literal["json_schema", "json_object", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must be. Equal kind and source are one grammar, compiled once."""

    kind: StructureKind
    source: str = ""  # the schema or tag as JSON, the pattern, or the EBNF; empty for json_object
    field: str = "response_format"  # of the request: where an error points
    begins_after: int = -1  # the token that ends the reasoning, which is free; -1: nothing is free


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field names and meanings are the OpenAI API's and vLLM's; docs/sampling.md says where those differ."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0 takes the most likely token; ties go to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    seed: int = 0  # sampling noise is a function of (seed, position) and of nothing else
    stop: tuple[str, ...] = ()  # never part of the text, but with include_stop; a lone text is one of them
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    forced_ids: tuple[int, ...] = ()  # a replay: these are the tokens, computed but not chosen
    min_p: float = 0.0  # of the most likely token's probability
    presence_penalty: float = 0.0  # of tokens that have been generated
    frequency_penalty: float = 0.0  # the same, for each time
    repetition_penalty: float = 1.0  # of tokens of the prompt too; a factor
    logit_bias: tuple[tuple[int, float], ...] = ()  # token and what is added, each token once
    min_tokens: int = 0  # before them nothing ends the output
    include_stop: bool = False  # the stop string, or the text of the stop token, stays in the text
    logprobs: int = -1  # alternatives to tell of each token, beside its own; -1: tell nothing
    prompt_logprobs: int = -1  # the same of the prompt's tokens
    structure: Structure | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # else each of its letters would end the text
            object.__setattr__(self, "stop", (self.stop,))
