"""Many requests of every fate through gateway, prefill and decode worker: nothing of them may stay."""

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from soak_results import keep, resident_mib
from stack import PATIENCE_S, Stack, serving

CLIENTS = 8
MAX_GROWTH_MIB = 24.0  # of the process that holds clients, gateway and both workers
SOAK = pytest.param(20_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])


@pytest.mark.parametrize("count", [pytest.param(64, id="short"), SOAK])
def test_requests_of_every_fate_leave_nothing_behind(
    tiny_model: Path, tmp_path: Path, cpu_library: Path, count: int
):
    with serving(tiny_model, tmp_path, disaggregated=True) as stack:
        warm_up = send(stack, range(count // 4))
        before_mib = settled_mib(stack)
        fates = warm_up + send(stack, range(count // 4, count))
        growth_mib = settled_mib(stack) - before_mib
    assert fates.total() == count
    assert len(fates) == len(FATES), f"not every fate took place: {fates}"
    if count > 1_000:  # less is not enough for the allocator to come to rest
        assert growth_mib < MAX_GROWTH_MIB
        keep("serving", {"requests": count, "fates": dict(fates), "growth_mib": round(growth_mib, 1)})


def settled_mib(stack: Stack) -> float:
    """Memory once nothing is queued, no block is held and the books of both workers balance."""
    stack.wait_until_idle()
    gc.collect()
    return resident_mib()


def send(stack: Stack, numbers: range) -> Counter[str]:
    return asyncio.run(_send(stack.url, iter(numbers)))


async def _send(url: str, numbers: Any) -> Counter[str]:
    """Eight clients, each with one request at a time; what became of them."""
    fates: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:

        async def client() -> None:
            for number in numbers:
                chance = random.Random(number)
                fate = FATES[chance.randrange(len(FATES))]
                await fate(http, chance)
                fates[fate.__name__] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return fates


def _body(chance: random.Random, **more: Any) -> dict[str, Any]:
    prompt = " ".join(chance.choice(("red", "green", "blue")) for _ in range(chance.randrange(1, 20)))
    return {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}],
        "max_tokens": chance.randrange(1, 24), "temperature": chance.choice((0, 1)), **more,
    }  # fmt: skip


async def _post(http: httpx.AsyncClient, body: dict[str, Any], status: int = 200) -> None:
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text


async def answered(http: httpx.AsyncClient, chance: random.Random) -> None:
    await _post(http, _body(chance))


async def two_choices(http: httpx.AsyncClient, chance: random.Random) -> None:
    await _post(http, _body(chance, n=2))


async def stopped(http: httpx.AsyncClient, chance: random.Random) -> None:
    await _post(http, _body(chance, stop=["e", "a"]))


async def too_long(http: httpx.AsyncClient, chance: random.Random) -> None:
    await _post(http, _body(chance) | {"max_tokens": 1 << 20}, status=400)


async def streamed(http: httpx.AsyncClient, chance: random.Random) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=_body(chance, stream=True)) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def hung_up(http: httpx.AsyncClient, chance: random.Random) -> None:
    body = _body(chance, stream=True) | {"max_tokens": 200}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break


FATES = (answered, two_choices, stopped, too_long, streamed, hung_up)
