"""`cache_salt`: requests of two salts share no cached prefix, on both routes and across a hand-off."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from stack import Stack, serving

TEXT = "the same long beginning of all of these prompts, more than one block of it, " * 4


@pytest.fixture(params=[False, True], ids=["one worker", "prefill and decode"])
def stack(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, cpu_library: Path
) -> Iterator[Stack]:
    with serving(
        tiny_model, tmp_path, disaggregated=request.param, kv_events=True, block_tokens=16
    ) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.sdk() as client:
        yield client


def cached(sdk: openai.OpenAI, salt: str | None, route: str) -> int:
    """Tokens of the prompt that came out of the cache."""
    extra = {} if salt is None else {"cache_salt": salt}
    if route == "completions":
        reply = sdk.completions.create(
            model="tiny", prompt=TEXT, max_tokens=2, temperature=0, extra_body=extra
        )
    else:
        said = [{"role": "user", "content": TEXT}]
        reply = sdk.chat.completions.create(  # pyright: ignore
            model="tiny",
            messages=said,  # type: ignore[arg-type]
            max_tokens=2,
            temperature=0,
            extra_body=extra,
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def hashes(stack: Stack) -> set[object]:
    """Of every block that a prefix cache has taken in."""
    found: set[object] = set()
    for worker in stack.workers:
        for _, batch in worker.call(lambda worker=worker: worker.engine.events_since(0)):
            for event in batch.events:
                found |= set(getattr(event, "block_hashes", ()))
    return found


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_two_salts_share_no_blocks(stack: Stack, sdk: openai.OpenAI, route: str) -> None:
    known: set[object] = set()
    for index, salt in enumerate(("one", "two", None, "öne")):
        assert cached(sdk, salt, route) == 0, f"a prefix of another salt than {salt!r}"
        made = hashes(stack) - known
        assert len(made) == (len(known) // index if index else len(made)) > 8, "keys that were there before"
        known |= made
    for salt in ("one", "two", None, "öne"):
        assert cached(sdk, salt, route) > 0


@pytest.mark.parametrize("salt", ["", "x" * 1025])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_salt_that_is_none_is_refused(sdk: openai.OpenAI, route: str, salt: str) -> None:
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached(sdk, salt, route)


def test_what_is_no_text_is_refused_and_the_engine_goes_on(stack: Stack, sdk: openai.OpenAI) -> None:
    for sent in ('"\\ud800"', "5", "[]"):
        body = f'{{"model": "tiny", "prompt": "a", "max_tokens": 1, "cache_salt": {sent}}}'
        reply = httpx.post(f"{stack.url}/v1/completions", content=body)
        assert reply.status_code == 400, sent
    assert cached(sdk, "one", "completions") == 0
