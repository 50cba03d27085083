"""After a thread that did not come up, nobody waits as long for the next; after one that did, they do."""

import threading

import pytest
from thread_shortage import run_short

import sandbox.undisturbed as undisturbed_module
from protocol.threads import NoThread, TimelyThread
from sandbox.missing_threads import Shortage
from sandbox.undisturbed import undisturbed

FOR_EVER_S = 3600.0


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    """A shortage that has been told of."""
    monkeypatch.setattr("sandbox.missing_threads._SHORT_S", FOR_EVER_S)
    one = Shortage()
    one.tell()
    return one


def test_the_next_that_does_not_come_up_is_not_waited_for(missing: Shortage, monkeypatch: pytest.MonkeyPatch):
    run_short(monkeypatch, "dead", up_s=FOR_EVER_S)
    done: list[int] = []
    thread = TimelyThread(lambda: done.append(1), name="late")
    with pytest.raises(NoThread, match="not up at once"):
        missing.start(thread)
    thread.run()  # it comes up after all
    assert done == []


def test_the_next_that_comes_up_ends_it(missing: Shortage):
    done = threading.Event()
    missing.start(TimelyThread(done.set, name="one"))
    assert done.wait(10)
    assert not missing.is_on


def test_a_thread_that_was_waited_for_in_vain_begins_it(monkeypatch: pytest.MonkeyPatch):
    one = Shortage()
    run_short(monkeypatch, "dead", up_s=0.5)
    with pytest.raises(NoThread):
        one.start(TimelyThread(lambda: None, name="dead"))
    assert one.is_on


def test_one_that_is_refused_at_once_is_no_reason_to_be_impatient(monkeypatch: pytest.MonkeyPatch):
    one = Shortage()
    run_short(monkeypatch, "none")
    with pytest.raises(NoThread):
        one.start(TimelyThread(lambda: None, name="none"))
    assert not one.is_on


def test_what_no_interrupt_may_part_is_done_at_once(missing: Shortage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(undisturbed_module, "shortage", missing)
    monkeypatch.setattr(undisturbed_module, "_free", [])
    run_short(monkeypatch, "dead", up_s=FOR_EVER_S)
    assert undisturbed(threading.current_thread) is threading.main_thread()
