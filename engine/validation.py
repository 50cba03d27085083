"""What an engine refuses before anything is queued: errors name the field, its value and what is expected."""

from itertools import pairwise

from engine.errors import ContextExceeded, InvalidRequest
from engine.field_types import check_fields
from engine.model.base import Model
from engine.request import Request
from engine.sampling.prompt_logprobs import check_prompt_logprobs

_MOST_SLACK_MS = 86_400_000


def check_request(request: Request, model: Model, max_positions: int, block_tokens: int) -> None:
    """Raises InvalidRequest. Parameters of sampling alone are the sampler's to check, but for their types."""
    check_fields(request)
    sampling, prompt = request.sampling, len(request.prompt_ids)
    if "\0" in request.id:  # it tells apart the outputs of one request
        raise InvalidRequest(f"the id {request.id!r:.80} has a zero character", parameter="request_id")
    if prompt == 0:
        raise InvalidRequest("the prompt is empty", parameter="messages")
    new = len(sampling.forced_ids) or sampling.max_tokens
    if new < 1:
        raise InvalidRequest(f"max_tokens is {new}; it must be at least 1", parameter="max_tokens")
    if prompt + new > max_positions:
        raise ContextExceeded.of(
            max_positions, f"{prompt} prompt tokens and {new} new ones exceed the {max_positions} positions",
            parameter="messages", please="shorten the prompt or lower max_tokens",
        )  # fmt: skip
    ids = (*request.prompt_ids, *sampling.forced_ids, *request.generated_ids)
    if not 0 <= min(ids) <= max(ids) < model.vocabulary:
        raise InvalidRequest(
            f"a token id lies outside the vocabulary of {model.vocabulary}", parameter="prompt_ids"
        )
    if not 0.0 <= request.slack_ms <= _MOST_SLACK_MS:
        raise InvalidRequest(
            f"slack_ms is {request.slack_ms}; it must be between 0 and {_MOST_SLACK_MS}, a day",
            parameter="slack_ms",
        )
    if request.choices < 1:
        raise InvalidRequest(f"n is {request.choices}; it must be at least 1", parameter="n")
    check_prompt_logprobs(sampling, prompt, skips_rows=model.resume_rules.replay)
    _check_images(request)
    _check_not_ended(request, model.eos_ids)
    _check_resumed(request, new, model.resume_rules.window, block_tokens)


def _check_images(request: Request) -> None:
    length = len(request.prompt_ids)
    for image in request.images:
        if not 0 <= image.start < image.stop <= length:
            raise InvalidRequest(
                f"an image has positions {image.start} to {image.stop}, not within the prompt's {length} ids",
                parameter="images",
            )


def _check_not_ended(request: Request, eos_ids: frozenset[int]) -> None:
    """No token given out so far is one that ends the output."""
    sampling = request.sampling
    if sampling.forced_ids:
        return
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
    found = next((n for n, token in enumerate(request.generated_ids) if token in ends), None)
    if found is not None:
        raise InvalidRequest(
            f"generated_ids has ended already: its token {found}, {request.generated_ids[found]}, is an end",
            parameter="generated_ids",
        )


def _check_resumed(request: Request, new: int, window: int, block_tokens: int) -> None:
    """Of a stream that goes on: it has tokens to come, and its windows ran again at ends of blocks."""
    if len(request.generated_ids) >= new:
        raise InvalidRequest(
            f"generated_ids has {len(request.generated_ids)} tokens of the {new} that were asked for",
            parameter="generated_ids",
        )
    places = request.resumed
    rising = all(one < other for one, other in pairwise(places))
    inside = all(window < p < len(request.prompt_ids) and p % block_tokens == 0 for p in places)
    if places and not (rising and inside and window):
        raise InvalidRequest(
            f"resumed is {places}, expected rising ends of blocks of {block_tokens} within the prompt and "
            f"beyond a window of {window}",
            parameter="resumed",
        )
