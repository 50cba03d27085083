"""Threads that grammars need: where none is to be had the request concerned is told, and nobody waits."""

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tiny_gguf import EOS

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import Overloaded
from engine.sampling.grammars import Grammars
from engine.sampling.thread_start import start_thread
from engine.sampling.watch import Watch
from protocol.sampling import Structure

AB = Structure("regex", "[ab]+")

# Of the thread's own stack the C library has kept one, so the kernel starts it; Python finds nothing for it.
SHORT = """
import resource, sys, threading
from pathlib import Path
from engine.errors import Overloaded
from engine.sampling import thread_start
from engine.sampling.grammars import Grammars
from engine.sampling.watch import Watch
from protocol.sampling import Structure

thread_start._UP_S = 0.5
for _ in range(2):
    threads = [threading.Thread(target=lambda: None) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
pages = int(Path("/proc/self/statm").read_text().split()[0])
unlimited = resource.getrlimit(resource.RLIMIT_AS)
hold = []
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), unlimited[1]))
try:
    size = 1 << 20
    while size >= 16:
        try:
            hold.append(bytearray(size))
        except MemoryError:
            size //= 2
    outcome = "started"
    Watch().start()
except (Overloaded, MemoryError) as error:
    outcome = type(error).__name__
hold.clear()
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print(outcome)
"""


@pytest.fixture
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def no_thread(*arguments: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


def dead_at_birth(*arguments: object) -> int:
    """As a thread that finds no memory for its first steps."""
    return 0


@pytest.fixture(params=["none", "dead", "its own dead"])
def shortage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    match request.param:
        case "none":
            monkeypatch.setattr("_thread.start_new_thread", no_thread)
        case "dead":
            monkeypatch.setattr("_thread.start_new_thread", dead_at_birth)
        case _:
            monkeypatch.setattr("threading._start_new_thread", dead_at_birth)
    monkeypatch.setattr("engine.sampling.thread_start._UP_S", 0.05)
    return monkeypatch


def test_a_thread_that_does_not_come_up_is_waited_for_so_long(shortage: pytest.MonkeyPatch) -> None:
    with pytest.raises(Overloaded, match="there is no thread for the request's grammar"):
        start_thread(threading.Thread(target=lambda: None, daemon=True))


def test_a_watch_without_a_thread_has_one_later(shortage: pytest.MonkeyPatch) -> None:
    """It took the one that had failed for one that runs."""
    watch = Watch()
    for _ in range(2):
        with pytest.raises(Overloaded):
            watch.run(lambda: True, 1.0)
    shortage.undo()
    assert watch.run(lambda: True, 1.0)[0]
    watch.close()


def test_a_grammar_without_a_thread_is_refused_and_the_next_one_compiled(
    grammars: Grammars, shortage: pytest.MonkeyPatch
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    with pytest.raises(Overloaded):
        grammars.prepare(AB, outcomes.put)
    with pytest.raises(Overloaded):  # for following it there is none either
        grammars.compile(AB)
    shortage.undo()
    assert grammars.known(AB) is None
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is grammars.known(AB) is not None
    assert outcomes.empty()


def test_the_thread_that_follows_is_there_before_a_step_needs_it(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is not None
    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    monkeypatch.setattr("threading._start_new_thread", no_thread)
    assert grammars.matcher(AB).allowed() is not None


def test_what_fails_to_tell_of_a_grammar_keeps_no_other_waiting(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()

    def broken(outcome: object) -> NoReturn:
        raise MemoryError

    grammars.prepare(AB, broken)
    grammars.prepare(AB, outcomes.put)
    assert outcomes.get(timeout=60) is not None


@pytest.mark.parametrize("times", range(3))
def test_without_address_space_nobody_waits_for_ever(times: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.strip() in ("Overloaded", "MemoryError", "started")
