"""Turns a sequence into a hand-off and back, refusing what does not fit."""

from dataclasses import astuple, dataclass

from engine.cache.keys import ImageKey
from engine.cache.kv_cache import payload_crc
from engine.errors import BrokenHandoff
from engine.model.base import Bounds, Held, State
from engine.request import Request, Sequence, Stages
from engine.scheduler.resume import Pass
from protocol.handoff import HANDOFF_VERSION, HandoffHeader, KvPayload, StageTimes, StateLayout


@dataclass(frozen=True, slots=True)
class Handoff:
    header: HandoffHeader
    payload: KvPayload


def hand_over(sequence: Sequence, held: Held, model: str, state: State) -> Handoff:
    """Copy out a sequence whose prompt, which is `held`, is computed and whose first token is chosen."""
    payload = state.export(held)
    stages = sequence.stages
    header = HandoffHeader(
        version=HANDOFF_VERSION,
        request_id=sequence.request.id,
        model=model,
        layout=state.layout(held),
        dtype=state.dtype,
        bounds=astuple(held.bounds),
        crc32=payload_crc(payload),
        prompt_ids=tuple(sequence.token_ids[: sequence.num_prompt]),
        generated_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
        num_cached=sequence.num_cached,
        priority=sequence.request.priority,
        sampling=sequence.request.sampling,
        stages=StageTimes(stages.arrived_ns, stages.scheduled_ns, stages.prefilled_ns, stages.spent),
        resumed=sequence.resumed or (),
        choice=sequence.choice,
        choices=sequence.request.choices,
        cache_salt=sequence.request.cache_salt,
        slack_ms=sequence.request.slack_ms,
        num_begun=len(sequence.request.generated_ids),
        images=tuple(astuple(image) for image in sequence.request.images),
    )
    return Handoff(header, payload)


def adopt(handoff: Handoff, model: str, state: State) -> Sequence:
    """The sequence of a hand-off, its KV still in the payload. Raises BrokenHandoff and names the field."""
    header = handoff.header
    _expect("version", header.version, HANDOFF_VERSION)
    _expect("model", header.model, model)
    _expect("dtype", header.dtype, state.dtype)
    _expect("generated_ids", len(header.generated_ids), header.num_begun + 1)
    begun = header.generated_ids[: header.num_begun]
    num_positions = len(header.prompt_ids) + len(begun)
    bounds = _bounds(header, num_positions)
    held = Held(0, range(num_positions), num_positions, bounds)  # a layout depends on no block
    _expect("layout", header.layout, state.layout(held))
    _expect("payload bytes", handoff.payload.nbytes, _bytes_of(header.layout))
    _expect("crc32", payload_crc(handoff.payload), header.crc32)
    request = Request(
        header.request_id, header.prompt_ids, header.sampling, header.priority, header.slack_ms,
        header.choices, header.cache_salt, _images(header), generated_ids=begun,
    )  # fmt: skip
    times = header.stages
    return Sequence(
        request,
        [*header.prompt_ids, *header.generated_ids],
        len(header.prompt_ids),
        header.choice,
        num_cached=header.num_cached,
        resumed=header.resumed,
        passes=(Pass(bounds),),
        incoming=handoff.payload,
        num_incoming=num_positions,
        stages=Stages(times.arrived_ns, times.scheduled_ns, times.prefilled_ns, spent=times.spent),
    )


def _bounds(header: HandoffHeader, num_positions: int) -> Bounds:
    """Raises BrokenHandoff where they cannot be those of the positions computed: the prompt and begun ids."""
    for field, places in (("bounds", header.bounds), ("resumed", header.resumed)):
        if not all(0 <= place <= num_positions for place in places):
            raise BrokenHandoff(
                f"hand-off field {field!r} is {places!r}, beyond the {num_positions} positions computed"
            )
    return Bounds(*header.bounds)


def _images(header: HandoffHeader) -> tuple[ImageKey, ...]:
    """Keys of blocks have them: without them another image's KV would be found. Raises BrokenHandoff."""
    length = len(header.prompt_ids)
    if not all(0 <= start < stop <= length for start, stop, _ in header.images):
        raise BrokenHandoff(f"hand-off field 'images' is {header.images!r}, beyond the prompt's {length} ids")
    return tuple(ImageKey(*image) for image in header.images)


def _bytes_of(layout: StateLayout) -> int:
    return sum(rows * width for _, rows, width in layout)


def _expect(field: str, found: object, expected: object) -> None:
    if found != expected:
        raise BrokenHandoff(f"hand-off field {field!r} is {found!r}, this worker expects {expected!r}")
