"""A model that says what it is forced to, with a timeline as the gateway would give it."""

import asyncio

from protocol.clock import SystemClock
from teams.model_client import Completion, Phase


class ForcedModel:
    def __init__(self, answer=None, *, seconds=0.0):
        self.answer = answer  # seed -> text, for calls that force nothing
        self.seconds = seconds

    async def close(self):
        pass

    async def complete(self, messages, *, max_tokens, temperature, seed, forced=None):
        clock = SystemClock()
        start = clock.now_ns()
        await asyncio.sleep(self.seconds)
        end = clock.now_ns()
        middle = (start + end) // 2
        phases = (
            Phase("model.prefill", start, middle, "gateway"),
            Phase("model.decode", middle, end, "gateway"),
        )
        text = forced if forced is not None else self.answer(seed)
        return Completion(text, phases, 1, 1, "req-test")
