"""Runs of an engine to the end, with its books checked after every step."""

from collections.abc import Iterable
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handoff import Handoff
from engine.request import FinishReason, Request

Outputs = dict[str, tuple[int, ...]]


def small_engine(model: Path, **settings: object) -> Engine:
    """One thread and a small cache: tests run side by side on few cores."""
    values = {"model": str(model), "threads": 1, "kv_cache_bytes": 8 << 20, **settings}
    return Engine(EngineConfig.model_validate(values))


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
