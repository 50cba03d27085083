"""A door before which more wait than it takes in at a time, and one who has no descriptor to ask by."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from forked_process import forked
from sandbox_places import no_descriptor_left

from sandbox.door import Door, HasLeft, Request, Tell, ask
from sandbox.door_names import name_of
from sandbox.errors import CapacityError
from sandbox.processes import ProcessKey, find_process

NOBODY = 65534


@pytest.fixture
def owner() -> Iterator[ProcessKey]:
    with forked(Door(lambda request, has_left, tell: "hello").open) as pid:
        key = find_process(pid)
        assert key is not None
        yield key


def hang_up_without_end(owner: ProcessKey) -> None:
    os.setuid(NOBODY)

    def hang_up() -> None:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, suppress(BlockingIOError):
                caller.setblocking(False)
                caller.connect(name_of(owner))

    threading.Thread(target=hang_up).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_who_hangs_up_without_end_keeps_nobody_out(owner: ProcessKey):
    with forked(lambda: hang_up_without_end(owner)):
        for _ in range(20):
            assert ask(owner, {}, patience_s=3) == "hello"


def test_whoever_asks_waits_for_a_place_within_his_patience(owner: ProcessKey):
    os.kill(owner.pid, signal.SIGSTOP)
    os.waitpid(owner.pid, os.WUNTRACED)
    with ExitStack() as crowd:
        with suppress(BlockingIOError):
            while True:
                caller = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                caller.setblocking(False)
                caller.connect(name_of(owner))
        with pytest.raises(CapacityError, match="too many wait"):
            ask(owner, {}, patience_s=0.1)
        threading.Timer(0.3, os.kill, (owner.pid, signal.SIGCONT)).start()
        assert ask(owner, {}) == "hello"


def test_one_who_has_no_descriptor_to_ask_by_is_told_so(owner: ProcessKey):
    with no_descriptor_left(), pytest.raises(CapacityError, match="Too many open files"):
        ask(owner, {})
    assert ask(owner, {}) == "hello"


def test_a_want_of_the_owners_is_told_as_his():
    def refuse(request: Request, has_left: HasLeft, tell: Tell) -> object:
        raise CapacityError("Too many open files", hint="raise `ulimit -n`")

    with forked(Door(refuse).open) as pid:
        owner = find_process(pid)
        assert owner is not None
        with pytest.raises(CapacityError, match=f"in process {pid}, which owns .*: Too many") as caught:
            ask(owner, {})
        assert (caught.value.hint, caught.value.retryable) == ("raise `ulimit -n`", True)
