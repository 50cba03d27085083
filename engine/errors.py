"""What the engine can refuse.

DockyardError
├── InvalidInput
│   ├── UnknownModel        a name that is neither built in nor a path
│   ├── BrokenModelFile     a file that cannot be what it says: truncated, foreign, a tensor missing
│   ├── InvalidRequest      a request that this model cannot serve; the gateway answers 400
│   │   └── GrammarStuck    an output that its grammar lets neither go on nor end
│   └── BrokenHandoff       a KV hand-off of another version, model or checksum
└── ResourceShortage
    └── Overloaded          the queue is full; the gateway answers 429
"""

from protocol.errors import InvalidInput, ResourceShortage


class UnknownModel(InvalidInput): ...


class BrokenModelFile(InvalidInput): ...


class InvalidRequest(InvalidInput):
    """`parameter` is the request's field, as the OpenAI error object names it."""

    def __init__(self, message: str, *, parameter: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.parameter = parameter


class GrammarStuck(InvalidRequest): ...


class BrokenHandoff(InvalidInput): ...


class Overloaded(ResourceShortage): ...
