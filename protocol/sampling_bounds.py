"""What values sampling parameters may have: the OpenAI API's bounds where it has the field, else vLLM's."""

MAX_LOGPROBS = 20  # the OpenAI API's, and vLLM's default
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "logprobs": (-1, MAX_LOGPROBS),
    "prompt_logprobs": (-1, MAX_LOGPROBS),
    "min_tokens": (0, 2**31),
}


def outside(name: str, value: float, low: float, high: float) -> str:
    """What is wrong with a value outside the bounds, or none at all; empty for one within them."""
    if low <= value <= high:
        return ""
    return f"{name} is {value}; it must be between {_plain(low)} and {_plain(high)}"


def _plain(value: float) -> str:
    """Whole numbers with all of their digits."""
    return str(int(value)) if value == int(value) else repr(value)
