"""How a request's next tokens are chosen; crosses the wire from the gateway to the engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field names and meanings are the OpenAI API's and vLLM's."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0 takes the most likely token; ties go to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    seed: int = 0  # sampling noise is a function of (seed, position) and of nothing else
    stop: tuple[str, ...] = ()  # never part of the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    forced_ids: tuple[int, ...] = ()  # a replay: these are the tokens, computed but not chosen
