"""A hand-off that does not fit is refused by the name of its field; one that fits survives its way."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_runs import drain, finish, small_engine
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import byte_ids, write_tiny_gguf

from engine import Engine, Request, SamplingParams
from engine.cache.keys import ImageKey
from engine.errors import BrokenHandoff, InvalidRequest, Overloaded
from engine.handoff import Handoff
from protocol.handoff import HandoffHeader, StageTimes, decode_header, encode_header
from protocol.kv_events import BlockStored

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden" / "b"
IDS: list[int] = json.loads((GOLDEN / "ids.json").read_text())
MakeDeepseek = Callable[[str], Engine]
REQUEST = Request(
    "r", tuple(byte_ids(b"the world says hello")), SamplingParams(max_tokens=8, ignore_eos=True)
)


@pytest.fixture
def decode(tiny_model: Path, cpu_library: Path) -> Engine:
    return small_engine(tiny_model, role="decode")


@pytest.fixture
def make_deepseek(cpu_library: Path) -> Iterator[MakeDeepseek]:
    made: list[Engine] = []

    def engine(role: str) -> Engine:
        made.append(small_engine(GOLDEN, kv_cache_bytes=1 << 20, role=role))
        return made[-1]

    yield engine
    for one in made:
        one.close()
        one.check_integrity()


@pytest.fixture
def handoff(tiny_model: Path, cpu_library: Path) -> Handoff:
    return handed_over(small_engine(tiny_model, role="prefill"))


def handed_over(prefill: Engine) -> Handoff:
    prefill.add(REQUEST)
    (handoff,) = prefill.step().handoffs
    assert not prefill.has_work
    assert prefill.statistics().pool.held == 0
    return handoff


def with_header(handoff: Handoff, **changes: object) -> Handoff:
    return Handoff(msgspec.structs.replace(handoff.header, **changes), handoff.payload)


def over_the_wire(handoff: Handoff) -> Handoff:
    """As Ray delivers it: the header as bytes, the payload in read-only memory."""
    payload = handoff.payload.copy()
    payload.flags.writeable = False
    return Handoff(decode_header(encode_header(handoff.header)), payload)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("model", "0" * 24),
        ("dtype", "float16"),
        ("generated_ids", ()),
        ("generated_ids", (5, 6)),
        ("layout", (("kv", 84, 128),)),
        ("layout", (("kv", 40, 256),)),
        ("layout", (("k", 80, 128),)),
        ("layout", ()),
        ("bounds", (0, 0, 0, 21)),
        ("bounds", (-1, 0, 0, 0)),
        ("resumed", (21,)),
        ("images", ((0, 21, "digest"),)),
        ("images", ((4, 4, "digest"),)),
        ("crc32", 0),
    ],
)
def test_a_field_that_does_not_match_is_refused_by_name(
    decode: Engine, handoff: Handoff, field: str, value: object
) -> None:
    with pytest.raises(BrokenHandoff, match=f"'{field}'"):
        decode.adopt(with_header(handoff, **{field: value}))
    assert not decode.has_work


def test_a_prompt_of_another_length_is_refused(decode: Engine, handoff: Handoff) -> None:
    with pytest.raises(BrokenHandoff, match="'layout'"):
        decode.adopt(with_header(handoff, prompt_ids=handoff.header.prompt_ids[:-1]))


@pytest.mark.parametrize("cut", [0, 1, 4, 4096])
def test_a_payload_of_another_size_is_refused(decode: Engine, handoff: Handoff, cut: int) -> None:
    with pytest.raises(BrokenHandoff, match="'payload bytes'"):
        decode.adopt(Handoff(handoff.header, handoff.payload[:cut]))


@pytest.mark.parametrize("where", [0, 5000, -1])
def test_one_flipped_bit_is_refused(decode: Engine, handoff: Handoff, where: int) -> None:
    payload = handoff.payload.copy()
    payload[where] ^= 1
    with pytest.raises(BrokenHandoff, match="'crc32'"):
        decode.adopt(Handoff(handoff.header, payload))
    assert not decode.has_work


def test_weights_of_another_file_are_refused(tmp_path: Path, decode: Engine, cpu_library: Path) -> None:
    other = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    with pytest.raises(BrokenHandoff, match="'model'"):
        decode.adopt(handed_over(small_engine(other, role="prefill")))


def test_a_request_that_never_fits_here_is_refused(
    tiny_model: Path, decode: Engine, handoff: Handoff
) -> None:
    long = replace(handoff.header.sampling, max_tokens=600)
    with pytest.raises(InvalidRequest, match="exceed the 512 positions"):
        decode.adopt(with_header(handoff, sampling=long))
    assert not decode.has_work


def test_a_full_queue_refuses(tiny_model: Path, handoff: Handoff) -> None:
    decode = small_engine(tiny_model, role="decode", max_waiting=1)
    decode.adopt(handoff)
    with pytest.raises(Overloaded):
        decode.adopt(with_header(handoff, request_id="other"))


def test_it_goes_on_after_the_wire(tiny_model: Path, decode: Engine, handoff: Handoff) -> None:
    expected = finish(small_engine(tiny_model), [REQUEST])["r"]
    decode.adopt(over_the_wire(handoff))
    outputs, reasons = drain(decode)
    assert handoff.header.generated_ids + outputs["r"] == expected
    assert reasons == {"r": "length"}


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(
    tiny_model: Path, cpu_library: Path
) -> None:
    prefill = small_engine(tiny_model, role="prefill")
    prefill.add(replace(REQUEST, sampling=SamplingParams(max_tokens=1)))
    result = prefill.step()
    assert (result.handoffs, [t.finish_reason for t in result.tokens]) == ([], ["length"])
    assert prefill.statistics().pool.held == 0


def test_an_aborted_hand_off_gives_up_its_place(decode: Engine, handoff: Handoff) -> None:
    decode.adopt(handoff)
    assert decode.abort("r")
    decode.check_integrity()
    assert not decode.has_work


def test_a_begun_stream_is_handed_over_behind_a_cached_prefix(make_deepseek: MakeDeepseek) -> None:
    """Its windows may start among the begun ids, which count as computed like the prompt."""
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    prompt, begun = tuple(IDS[:40]), tuple(IDS[40:90])
    prefill, decode = make_deepseek("prefill"), make_deepseek("decode")
    found: list[tuple[int, ...]] = []
    for name in ("first", "second"):
        prefill.add(Request(name, prompt, sampling, generated_ids=begun))
        handoffs: list[Handoff] = []
        while prefill.has_work:
            handoffs += prefill.step().handoffs
        decode.adopt(over_the_wire(handoffs[0]))
        outputs, _ = drain(decode)
        found.append(handoffs[0].header.generated_ids[len(begun) :] + outputs[name])
    assert max(handoffs[0].header.bounds) > len(prompt)
    assert found[0] == found[1]


def test_images_cross_so_that_no_other_image_finds_their_blocks(tiny_model: Path, cpu_library: Path) -> None:
    prefill = small_engine(tiny_model, role="prefill")
    decode = small_engine(tiny_model, role="decode", block_tokens=4, kv_events=True)
    hashes: list[tuple[bytes | int, ...]] = []
    for digest in ("cat", "dog"):
        prefill.add(replace(REQUEST, id=digest, images=(ImageKey(2, 6, digest),)))
        (handoff,) = prefill.step().handoffs
        decode.adopt(over_the_wire(handoff))
        drain(decode)
        decode.check_integrity()
        (_, batch) = decode.events_since(0)[-1]
        hashes.append(
            tuple(key for e in batch.events if isinstance(e, BlockStored) for key in e.block_hashes)
        )
    assert hashes[0]
    assert hashes[1]
    assert not set(hashes[0]) & set(hashes[1])


small_ints = st.integers(0, 2**31)
headers = st.builds(
    HandoffHeader,
    version=small_ints, request_id=st.text(), model=st.text(),
    layout=st.lists(st.tuples(st.text(), small_ints, small_ints)).map(tuple),
    dtype=st.text(), bounds=st.tuples(*[small_ints] * 4), crc32=st.integers(0, 2**32 - 1),
    prompt_ids=st.lists(small_ints).map(tuple),
    generated_ids=st.lists(small_ints).map(tuple), num_cached=small_ints, priority=st.integers(-9, 9),
    sampling=st.builds(
        SamplingParams, max_tokens=small_ints, temperature=st.floats(0, 2), seed=st.integers(-(2**63), 2**63),
        stop=st.lists(st.text()).map(tuple), forced_ids=st.lists(small_ints).map(tuple),
    ),
    stages=st.builds(StageTimes, small_ints, small_ints, small_ints),
    images=st.lists(st.tuples(small_ints, small_ints, st.text())).map(tuple),
)  # fmt: skip


@given(header=headers)
def test_a_header_survives_the_wire(header: HandoffHeader) -> None:
    assert decode_header(encode_header(header)) == header


@given(header=headers, data=st.data())
def test_a_cut_header_is_no_header(header: HandoffHeader, data: st.DataObject) -> None:
    encoded = encode_header(header)
    with pytest.raises(msgspec.DecodeError):
        decode_header(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_the_payload_is_the_cache_in_order_of_position(tiny_model: Path, cpu_library: Path) -> None:
    """Rows of layers, keys and values, and positions, whatever blocks the positions lie in."""
    engines = [small_engine(tiny_model, role="prefill", block_tokens=size) for size in (3, 16)]
    one, two = (handed_over(engine) for engine in engines)
    assert np.array_equal(one.payload, two.payload)
    assert one.header.layout == (("kv", 2 * 2 * len(REQUEST.prompt_ids), 2 * 16 * 4),)
