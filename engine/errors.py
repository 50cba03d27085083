"""What the engine can refuse.

DockyardError
├── InvalidInput
│   ├── UnknownModel        a name that is neither built in nor a path
│   ├── BrokenModelFile     a file that cannot be what it says: truncated, foreign, a tensor missing
│   ├── InvalidRequest      a request that this model cannot serve; the gateway answers 400
│   │   ├── ContextExceeded a prompt, with what is to follow it, that has more tokens than the model positions
│   │   ├── GrammarStuck    an output that its grammar lets neither go on nor end
│   │   └── CompilingFailed a grammar for which time or memory was too short, at this moment
│   ├── EngineClosed        an engine that has been closed, of which something is asked
│   ├── BrokenHandoff       a KV hand-off of another version, model or checksum
│   └── UnusableTier        a folder for KV that cannot be read or written
├── InvalidLogits           a row of the model that is no distribution: a fault of ours, not of its request
├── GrammarFault            a grammar at which the compiler failed in no way that it names: likewise
└── ResourceShortage
    └── Overloaded          the queue is full, or memory or threads are out; the gateway answers 429
"""

from protocol.errors import DockyardError, InvalidInput, ResourceShortage


class UnknownModel(InvalidInput): ...


class BrokenModelFile(InvalidInput): ...


class InvalidRequest(InvalidInput):
    """`parameter` is the request's field, as the OpenAI error object names it."""

    def __init__(self, message: str, *, parameter: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.parameter = parameter


class ContextExceeded(InvalidRequest):
    """Clients that shorten a conversation and try again know it by OpenAI's code and wording.

    LiteLLM and others look for "this model's maximum context length is" in any case, agents for the number
    before "tokens" too. Sources: OpenAI API reference, error codes; LiteLLM, exception mapping.
    """

    @classmethod
    def of(cls, max_positions: int, asked: str, *, parameter: str, please: str) -> "ContextExceeded":
        """`asked` and `please` are the rest of sentences that begin with `However, ` and `Please `."""
        bound = f"This model's maximum context length is {max_positions} tokens"
        return cls(f"{bound}. However, {asked}. Please {please}.", parameter=parameter)


class GrammarStuck(InvalidRequest): ...


class CompilingFailed(InvalidRequest): ...


class EngineClosed(InvalidInput): ...


class BrokenHandoff(InvalidInput): ...


class UnusableTier(InvalidInput): ...


class InvalidLogits(DockyardError): ...


class GrammarFault(DockyardError): ...


class Overloaded(ResourceShortage):
    """`retry_after_s`: when there is likely to be room again."""

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
