"""Engines of small models, and runs to the end with their books checked after every step."""

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiny_gguf import TOKENS

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handoff import Handoff
from engine.request import FinishReason, Request

GOLDEN = Path(__file__).parent / "data" / "v41_golden" / "b"
IDS: list[int] = json.loads((GOLDEN / "ids.json").read_text())
KINDS = ("llama", "replay", "whole")  # of models: DeepSeek's with replay and without
Outputs = dict[str, tuple[int, ...]]
Texts = dict[tuple[str, int], tuple[int, ...]]  # by request and output
Make = Callable[..., Engine]


def small_engine(model: Path, **settings: object) -> Engine:
    """One thread and a small cache: tests run side by side on few cores."""
    values = {"model": str(model), "threads": 1, "kv_cache_bytes": 8 << 20, **settings}
    return Engine(EngineConfig.model_validate(values))


@contextmanager
def engines_of(kind: str, tiny_model: Path) -> Iterator[Make]:
    """Makes engines of one of `KINDS`; at the end they are closed, and their books looked at once more."""
    made: list[Engine] = []

    def engine(**settings: object) -> Engine:
        if kind == "llama":
            made.append(small_engine(tiny_model, operations="c", **settings))
        else:
            cache = {"kv_cache_bytes": 1 << 20, "replay": kind == "replay"}
            made.append(small_engine(GOLDEN, **{**cache, **settings}))
        return made[-1]

    yield engine
    for one in made:
        one.close()
        one.check_integrity()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids that the models of all kinds have; equal seeds share their start."""
    return tuple(random.Random(seed).choices(range(3, min(len(TOKENS), max(IDS))), k=length))


def forget_device(engine: Engine) -> None:
    """Evict every block that nobody holds."""
    blocks = engine.pool.allocate(engine.pool.num_available)
    engine.pool.release(blocks)


def finish(engine: Engine, requests: Iterable[Request] = ()) -> Outputs:
    """Every request's tokens. Fails where a step does nothing, or where something stays held at the end."""
    for request in requests:
        engine.add(request)
    outputs, _ = drain(engine)
    return outputs


def drain(engine: Engine) -> tuple[Outputs, dict[str, FinishReason]]:
    """Tokens and finish reasons of all that the engine has."""
    outputs: Outputs = {}
    reasons: dict[str, FinishReason] = {}
    firsts: dict[str, int] = {}  # a request may have begun before
    while engine.has_work:
        result = engine.step()
        assert result.num_rows > 0 or engine.statistics().loading, "a step with work to do did none"
        engine.check_integrity()
        for output in result.tokens:
            first = firsts.setdefault(output.request_id, output.index)
            known = first + len(outputs.get(output.request_id, ()))
            assert output.index == known, "a token is missing or repeated"
            outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    assert engine.statistics().pool.held == 0, "blocks stay held when all requests have ended"
    return outputs, reasons


def outcomes(
    engine: Engine, late: Iterable[Request] = (), begun: Collection[str] = ()
) -> tuple[Texts, dict[str, Exception]]:
    """Tokens, and what has failed, of an engine in which a step may do nothing, since its sequences begin
    again. `late` come one a step, from the fourth on; `begun` have had tokens before."""
    texts: Texts = {}
    failed: dict[str, Exception] = {}
    firsts: dict[tuple[str, int], int] = {}
    coming, steps = list(late), 0
    while engine.has_work or coming:
        if coming and steps >= 3:
            engine.add(coming.pop(0))
        result = engine.step()
        engine.check_integrity()
        failed.update(result.failed)
        for output in result.tokens:
            key = output.request_id, output.choice
            first = firsts.setdefault(key, output.index if output.request_id in begun else 0)
            assert output.index == first + len(texts.get(key, ())), "a token is missing or repeated"
            texts[key] = texts.get(key, ()) + output.token_ids
        steps += 1
        assert steps < 2000, "it comes to no end"
    assert engine.statistics().pool.held == 0, "blocks stay held when all requests have ended"
    return texts, failed


def finish_disaggregated(prefill: Engine, decode: Engine, requests: Iterable[Request]) -> Outputs:
    """Through a prefill engine, hand-offs, and a decode engine, both stepping in turn."""
    outputs: Outputs = {}
    for request in requests:
        prefill.add(request)
    while prefill.has_work or decode.has_work:
        handoffs: list[Handoff] = []
        for engine in (prefill, decode):
            result = engine.step()
            engine.check_integrity()
            handoffs += result.handoffs
            for output in result.tokens:
                outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
        for handoff in handoffs:
            decode.adopt(handoff)
    assert prefill.statistics().pool.held == decode.statistics().pool.held == 0
    return outputs
