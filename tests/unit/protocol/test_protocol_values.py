"""Values that cross processes come back as they were, and errors carry their way out."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import errors as engine_errors
from protocol.clock import SystemClock
from protocol.errors import DockyardError, InvalidInput, MissingCapability, ResourceShortage
from protocol.ids import new_id
from protocol.sampling import SamplingParams
from protocol.wire import Abort, Failed, FromEngine, Hello, Submit, ToEngine, Tokens

names = st.text(max_size=20)
ids = st.lists(st.integers(0, 2**31), max_size=20).map(tuple)
times = st.integers(0, 2**62)
samplings = st.builds(
    SamplingParams, max_tokens=st.integers(1, 2**31), temperature=st.floats(0, 2), top_p=st.floats(0, 1),
    seed=st.integers(-(2**62), 2**62), stop=st.lists(names).map(tuple), forced_ids=ids,
)  # fmt: skip
to_engine = st.one_of(
    st.builds(Hello, names),
    st.builds(Abort, names),
    st.builds(Submit, names, ids, samplings, times, st.integers(-9, 9)),
)
reasons = st.sampled_from(["stop", "length", None])
from_engine = st.one_of(
    st.builds(Tokens, names, st.integers(0, 2**31), ids, reasons, times, times, times, times, times, times),
    st.builds(Failed, names, st.sampled_from(["invalid", "overloaded", "lost", "internal"]), names, names),
)


@given(message=to_engine)
def test_messages_to_an_engine_survive_the_wire(message: ToEngine) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@given(messages=st.lists(from_engine, max_size=5))
def test_messages_from_an_engine_survive_the_wire(messages: list[FromEngine]) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(messages), type=list[FromEngine]) == messages


@pytest.mark.parametrize(
    ("kind", "code"),
    [(DockyardError, 1), (InvalidInput, 2), (MissingCapability, 3), (ResourceShortage, 4),
     (engine_errors.UnknownModel, 2), (engine_errors.BrokenHandoff, 2), (engine_errors.Overloaded, 4)],
)  # fmt: skip
def test_errors_tell_the_way_out_and_their_exit_code(kind: type[DockyardError], code: int) -> None:
    assert str(kind("it broke")) == "it broke"
    assert str(kind("it broke", hint="mend it")) == "it broke (mend it)"
    assert kind.exit_code == code


def test_ids_are_told_apart_by_prefix_and_do_not_repeat() -> None:
    made = {new_id("req") for _ in range(1000)}
    assert len(made) == 1000
    assert all(name.startswith("req-") and len(name) == 19 for name in made)


def test_the_clock_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.now_ns() for _ in range(100)]
    assert readings == sorted(readings)
