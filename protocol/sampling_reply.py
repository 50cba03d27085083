"""What an engine tells of a token beside the token."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float  # natural logarithm of its probability


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one position. `top`: the most likely tokens, the chosen one among them or not."""

    token_id: int
    logprob: float
    rank: int  # of the token among all, from 1
    top: tuple[TokenLogprob, ...] = ()
