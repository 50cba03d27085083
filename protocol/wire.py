"""What a gateway and an engine say to each other over their socket: msgpack frames, batched per step.

A frame is a 4-byte big-endian length and a msgpack body. Request ids start with the id of the gateway
connection that asked (`<client>/<number>`), which is how any worker knows where the tokens go.
"""

from typing import Literal

import msgspec

from protocol.sampling import SamplingParams
from protocol.sampling_reply import TokenLogprobs
from protocol.stages import StageNs

MAX_FRAME_BYTES = 16 << 20
FailureCode = Literal["invalid", "context_length_exceeded", "overloaded", "lost", "internal"]


# ------------------------------------------------------------------ received by an engine
class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a connection: the client's id. The engine answers with a batch of no messages."""

    client: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_ns: int  # when the gateway had the request: waiting for the engine's next step is queueing too
    priority: int = 0
    choices: int = 1  # outputs for the one prompt; number k has the seed plus k
    slack_ms: float = 0.0  # how much later it may start without holding anyone up
    cache_salt: str = ""  # cached prefixes are shared with requests of the same salt alone
    # Of a stream that goes on: tokens that another worker gave out, and where windows were run again there.
    generated_ids: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str
    choice: int = -1  # one of its outputs; -1: all of them


ToEngine = Hello | Submit | Abort


# ------------------------------------------------------------------ received by a gateway
class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of one request; `index` counts those before. Times are CLOCK_MONOTONIC nanoseconds."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"] | None
    arrived_ns: int
    scheduled_ns: int
    prefilled_ns: int
    adopted_ns: int
    produced_ns: int
    num_cached: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # of these tokens, where the request asks for them
    choice: int = 0  # which of the request's outputs; `index` counts within it
    # Of the prompt's tokens but the first, with the first token; of a long prompt in messages before it too,
    # which have no token.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    resumed: tuple[int, ...] = ()  # where windows were run again: what it takes to go on elsewhere
    stages: StageNs | None = None  # of this output's steps so far, where the model has stages


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request has ended in an error; nothing of it is left in the engine."""

    request_id: str
    code: FailureCode
    message: str
    parameter: str = ""
    retry_after_s: float = 0.0  # where it is overloaded: when to try again, 0 where nobody knows


FromEngine = Tokens | Failed
