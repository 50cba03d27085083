"""One key, one order, one sandbox."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sandbox.errors import CapacityError, Conflict, InvalidArgument, SandboxGone
from sandbox.keys import MAX_KEY, REMEMBERED_S, Keys
from sandbox.limits import Asked
from sandbox.orders import Order, difference
from sandbox.policy import Network, Policy

ORDER = Order("host", "function", Policy(), Asked(), (), Path("/state"), Path("/toolkit"))


@dataclass(slots=True)
class Box:
    number: int = 0
    ended: SandboxGone | None = None


def test_a_repeated_order_gives_the_first_ones_sandbox():
    keys: Keys[Box] = Keys()
    first = keys.get_or_make("a", ORDER, Box)
    assert keys.get_or_make("a", replace(ORDER), Box) is first
    assert keys.get_or_make("b", ORDER, Box) is not first
    assert keys.get_or_make("a", replace(ORDER, state_dir=Path("/other")), Box) is not first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limits": Asked(memory_mb=64)}, "memory_mb=64, which was None"),
        ({"substrate": "container"}, "substrate='container', which was 'function'"),
        ({"policy": Policy(timeout_s=1)}, "another policy"),
        ({"labels": (("run", "1"),)}, "another labels"),
        ({"snapshot": "base"}, "snapshot='base', which was None"),
    ],
)
def test_another_order_is_a_conflict_that_names_the_field(change: dict[str, object], words: str):
    keys: Keys[Box] = Keys()
    keys.get_or_make("a", ORDER, Box)
    with pytest.raises(Conflict, match=words) as caught:
        keys.get_or_make("a", replace(ORDER, **change), Box)
    assert "new key" in caught.value.hint
    assert caught.value.blame == "caller"


def test_equal_orders_have_no_difference():
    other = replace(ORDER, policy=Policy(), limits=Asked())
    assert difference(ORDER, other) == ""
    assert hash(ORDER) == hash(other)


def test_many_at_once_make_one():
    keys: Keys[Box] = Keys()
    made, got, gate = [], [], threading.Barrier(8)

    def make() -> Box:
        made.append(Box())
        return made[-1]

    def ask() -> None:
        gate.wait()
        got.append(keys.get_or_make("a", ORDER, make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 1
    assert len(got) == 8
    assert all(each is made[0] for each in got)


def test_a_create_that_fails_frees_its_key_and_tells_those_who_wait():
    keys: Keys[Box] = Keys()
    began, go_on = threading.Event(), threading.Event()
    heard: list[Exception] = []

    def fail() -> Box:
        began.set()
        go_on.wait(20)
        raise CapacityError("full")

    def ask() -> None:
        try:
            keys.get_or_make("a", ORDER, fail)
        except CapacityError as error:
            heard.append(error)

    first = threading.Thread(target=ask)
    first.start()
    began.wait(20)
    second = threading.Thread(target=ask)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert [error.message for error in map(_as_capacity, heard)] == ["full", "full"]
    assert keys.get_or_make("a", ORDER, Box).ended is None


def _as_capacity(error: Exception) -> CapacityError:
    assert isinstance(error, CapacityError)
    return error


def test_an_interrupted_create_frees_its_key():
    keys: Keys[Box] = Keys()

    def interrupt() -> Box:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keys.get_or_make("a", ORDER, interrupt)
    assert keys.get_or_make("a", ORDER, lambda: Box(2)).number == 2


def test_a_key_of_an_ended_sandbox_makes_no_other():
    keys: Keys[Box] = Keys()
    keys.get_or_make("a", ORDER, Box).ended = SandboxGone(
        "sbx-1 was killed", reason="killed", sandbox_id="sbx-1"
    )
    with pytest.raises(SandboxGone, match=r"key='a'.*sbx-1 was killed") as caught:
        keys.get_or_make("a", ORDER, Box)
    assert (caught.value.reason, caught.value.sandbox_id) == ("killed", "sbx-1")


def test_ended_sandboxes_are_let_go_of_and_their_keys_after_a_day():
    now = [0.0]
    keys: Keys[Box] = Keys(lambda: now[0])
    boxes = [keys.get_or_make(str(number), ORDER, Box) for number in range(300)]
    for box in boxes:
        box.ended = SandboxGone("gone", reason="killed")
    for number in range(300, 600):
        keys.get_or_make(str(number), ORDER, Box)
    with pytest.raises(SandboxGone):
        keys.get_or_make("0", ORDER, Box)
    now[0] = REMEMBERED_S + 1
    for number in range(600, 900):
        keys.get_or_make(str(number), ORDER, Box)
    assert keys.get_or_make("0", ORDER, Box) is not boxes[0]


@pytest.mark.parametrize("key", ["", "x" * (MAX_KEY + 1)])
def test_a_key_has_a_length(key: str):
    with pytest.raises(InvalidArgument, match=f"key of {len(key)} characters"):
        Keys[Box]().get_or_make(key, ORDER, Box)


def test_policies_can_be_keys():
    one = Policy(phases={"a": "none", "b": Network()}, hidden=("/x",))
    other = Policy(phases={"b": Network(), "a": "none"}, hidden=("/x",))
    assert one == other
    assert {one: 1}[other] == 1
    assert hash(one) != hash(Policy())
