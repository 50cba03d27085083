"""A completion request: prompts that are text or token ids, without any form of a chat."""

from dataclasses import replace
from typing import cast

from engine.chat.form import check_length
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest
from gateway.chat_sampling import read_choices, read_max_tokens, read_sampling, within
from gateway.chat_structure import read_structure
from gateway.completion_body import CompletionBody, check_completion
from gateway.config import GatewayConfig
from gateway.extension import read_generation
from gateway.generation import Asked, Generation
from gateway.sampling_body import StreamOptions
from protocol.sampling_bounds import MAX_LOGPROBS

_DEFAULT_TOKENS = 16  # the API's
_MOST_PROMPTS = 256

Prompt = str | list[int]


def prepare_completion(
    body: CompletionBody,
    tokenizer: ChatTokenizer,
    opening: tuple[int, ...],
    max_positions: int,
    config: GatewayConfig,
) -> Asked:
    """Tokenise and check. `opening`: the tokens that the model expects at the start of any text.

    Text may hold control tokens, which are recognised, as in vLLM; ids are taken as they are. Blocks as
    tokenising does. Raises InvalidRequest.
    """
    check_completion(body)
    logprobs = -1 if body.logprobs is None else int(within("logprobs", body.logprobs, 0, MAX_LOGPROBS))
    asked = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = read_sampling(body, asked, logprobs, read_structure(body))
    choices, prompts = read_choices(body, sampling, config), _prompts(body)
    common = read_generation(body, choices, len(prompts))
    generations: list[Generation] = []
    for index, prompt in enumerate(prompts):
        ids = _ids(prompt, tokenizer, opening, max_positions)
        read_max_tokens(asked, asked, len(ids), max_positions, needed=asked, parameter="prompt")
        generations.append(replace(common, prompt_ids=ids, first_choice=index * len(choices)))
    options = body.stream_options or StreamOptions()
    return Asked(tuple(generations), bool(body.stream), options.include_usage)


def _prompts(body: CompletionBody) -> list[Prompt]:
    sent = body.prompt
    if isinstance(sent, str):
        return [sent]
    if not sent:
        raise _refused("is empty")
    if len(kinds := {type(prompt) for prompt in sent}) > 1:
        raise _refused(f"mixes {' and '.join(sorted(kind.__name__ for kind in kinds))}")
    if isinstance(sent[0], int):
        return [cast(list[int], sent)]
    if len(sent) > _MOST_PROMPTS:
        raise _refused(f"has {len(sent)} of them; at most {_MOST_PROMPTS}")
    return cast(list[Prompt], sent)


def _ids(
    prompt: Prompt, tokenizer: ChatTokenizer, opening: tuple[int, ...], max_positions: int
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_length("prompt", len(prompt), tokenizer, max_positions)
        ids = tuple(tokenizer.encode(prompt))
        if ids[: len(opening)] != opening:
            ids = (*opening, *ids)
    else:
        ids = tuple(int(within("prompt", token, 0, 2**31 - 1)) for token in prompt)
    if not ids:
        raise _refused("is empty")
    return ids


def _refused(fault: str) -> InvalidRequest:
    return InvalidRequest(
        f"prompt {fault}", parameter="prompt",
        hint="send a text, a list of token ids, or a list of either",
    )  # fmt: skip
