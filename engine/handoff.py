"""Turns a sequence into a hand-off and back, refusing what does not fit."""

from dataclasses import dataclass

from engine.cache.kv_cache import KvCache, payload_crc
from engine.errors import BrokenHandoff
from engine.request import Request, Sequence, Stages
from protocol.handoff import HANDOFF_VERSION, HandoffHeader, KvPayload, StageTimes

DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Handoff:
    header: HandoffHeader
    payload: KvPayload


def hand_over(sequence: Sequence, model: str, cache: KvCache) -> Handoff:
    """Copy out a sequence whose prompt is computed and whose first token is chosen."""
    payload = cache.export(sequence.blocks, sequence.num_computed)
    stages = sequence.stages
    header = HandoffHeader(
        version=HANDOFF_VERSION,
        request_id=sequence.id,
        model=model,
        layout=cache.layout(sequence.num_computed),
        dtype=DTYPE,
        crc32=payload_crc(payload),
        prompt_ids=tuple(sequence.token_ids[: sequence.num_prompt]),
        generated_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
        num_cached=sequence.num_cached,
        priority=sequence.request.priority,
        sampling=sequence.request.sampling,
        stages=StageTimes(stages.arrived_ns, stages.scheduled_ns, stages.prefilled_ns),
    )
    return Handoff(header, payload)


def adopt(handoff: Handoff, model: str, cache: KvCache) -> Sequence:
    """The sequence of a hand-off, its KV still in the payload. Raises BrokenHandoff and names the field."""
    header = handoff.header
    _expect("version", header.version, HANDOFF_VERSION)
    _expect("model", header.model, model)
    _expect("dtype", header.dtype, DTYPE)
    _expect("generated_ids", len(header.generated_ids), 1)
    _expect("layout", header.layout, cache.layout(len(header.prompt_ids)))
    _expect("payload bytes", handoff.payload.nbytes, _bytes_of(header.layout))
    _expect("crc32", payload_crc(handoff.payload), header.crc32)
    request = Request(header.request_id, header.prompt_ids, header.sampling, header.priority)
    times = header.stages
    return Sequence(
        request,
        [*header.prompt_ids, *header.generated_ids],
        len(header.prompt_ids),
        num_cached=header.num_cached,
        incoming=handoff.payload,
        stages=Stages(times.arrived_ns, times.scheduled_ns, times.prefilled_ns),
    )


def _bytes_of(layout: tuple[int, ...]) -> int:
    count = 4
    for size in layout:
        count *= size
    return count


def _expect(field: str, found: object, expected: object) -> None:
    if found != expected:
        raise BrokenHandoff(f"hand-off field {field!r} is {found!r}, this worker expects {expected!r}")
