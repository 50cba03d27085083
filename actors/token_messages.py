"""An engine's tokens as messages to the gateway that has asked for them."""

from collections.abc import Iterator

from msgspec.structs import replace

from engine.results import TokenOutput
from protocol.wire import Tokens

_MOST_TOLD = 4096  # positions of a prompt in one message: 1.4 MB with 20 alternatives each


def token_messages(output: TokenOutput, now_ns: int) -> Iterator[Tokens]:
    """The tokens, and before them what is told of a long prompt, in messages without a token.

    So no message is too large for a frame, and a gateway does other work between two of them.
    """
    stages, told = output.stages, output.prompt_logprobs
    message = Tokens(
        output.request_id, output.index, output.token_ids, output.finish_reason,
        stages.arrived_ns, stages.scheduled_ns, stages.prefilled_ns, stages.adopted_ns, now_ns,
        output.num_cached, (output.logprobs,) if output.logprobs is not None else (), output.choice,
        told, output.resumed, stages.spent,
    )  # fmt: skip
    last = max(len(told) - 1, 0) // _MOST_TOLD * _MOST_TOLD  # where the last part begins
    for start in range(0, last, _MOST_TOLD):
        part = told[start : start + _MOST_TOLD]
        yield replace(message, token_ids=(), finish_reason=None, logprobs=(), prompt_logprobs=part)
    yield replace(message, prompt_logprobs=told[last:]) if last else message
