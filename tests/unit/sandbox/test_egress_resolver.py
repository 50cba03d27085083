"""The resolver on this machine's loopback: whom it asks, what it believes, what it tells."""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest

from protocol.clock import SystemClock
from sandbox.egress import messages
from sandbox.egress.messages import A, Address
from sandbox.egress.resolver import BURST, MAX_PENDING, Resolver

GOOD = IPv4Address("203.0.113.7")
OWN = "203.0.113.99"


class Client:
    """Allows example.org; `room` says whether it takes what it is told."""

    def __init__(self) -> None:
        self.learnt: list[tuple[str, tuple[Address, ...], int]] = []
        self.refused: list[tuple[str, str]] = []
        self.room = True

    def allows_name(self, name: str) -> bool:
        return name == "example.org"

    def is_own(self, address: Address) -> bool:
        return str(address) == OWN

    def learn(self, name: str, addresses: tuple[Address, ...], ttl_s: int) -> bool:
        self.learnt.append((name, addresses, ttl_s))
        return self.room

    def refuse_name(self, name: str, why: str) -> None:
        self.refused.append((name, why))


def a_socket() -> socket.socket:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(("127.0.0.1", 0))
    one.settimeout(10)
    return one


class Bench:
    """A resolver between a sandbox's socket and a nameserver's, both the test's."""

    def __init__(self) -> None:
        self.nameserver, self.sandbox, listener = a_socket(), a_socket(), a_socket()
        self.at = listener.getsockname()
        self.client = Client()
        self.losses: list[str] = []
        self.resolver = Resolver(
            lambda: None, self.nameserver.getsockname(), SystemClock(), lambda: self.losses.append("lost")
        )
        self.stop: Callable[[], None] = self.resolver.serve(listener, self.client)

    def ask(self, name: str, ident: int = 7) -> None:
        self.sandbox.sendto(messages.write_question(ident, name, A), self.at)

    def hear(self) -> tuple[int, tuple[Address, ...]]:
        """Code and addresses of the next reply to the sandbox."""
        answer = messages.read_answer(self.sandbox.recv(512), 7, "example.org", A)
        return answer.code, answer.addresses

    def answer(self, *addresses: Address, code: int = 0, ttl_s: int = 60, spoil: int = 0) -> bytes:
        """The nameserver's reply to the query that it waits for; `spoil` changes its id."""
        message, asker = self.nameserver.recvfrom(512)
        question = messages.read_question(message)
        reply = messages.write_reply(question, code, addresses, ttl_s)
        if spoil:
            wrong = struct.pack(">H", (question.id + spoil) & 0xFFFF) + reply[2:]
            self.nameserver.sendto(wrong, asker)
            self.nameserver.sendto(b"\0", asker)
        self.nameserver.sendto(reply, asker)
        return message

    def close(self) -> None:
        self.stop()
        self.stop()
        self.resolver.close()
        self.resolver.close()
        self.nameserver.close()
        self.sandbox.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.close()


def test_an_allowed_name_is_asked_for_learnt_and_told(bench: Bench):
    bench.ask("Example.ORG")
    sent = messages.read_question(bench.answer(GOOD))
    assert (sent.name, sent.type) == ("example.org", A)
    assert bench.hear() == (0, (GOOD,))
    assert bench.client.learnt == [("example.org", (GOOD,), 60)]


def test_another_name_is_refused_here(bench: Bench):
    bench.ask("example.com")
    reply = bench.sandbox.recv(512)
    assert reply[3] & 15 == messages.REFUSED
    assert bench.client.refused == [("example.com", "is not allowed")]
    bench.ask("example.org")
    assert messages.read_question(bench.answer(GOOD)).name == "example.org"  # the first that arrives


def test_answers_to_other_questions_are_passed_over(bench: Bench):
    bench.ask("example.org")
    bench.answer(GOOD, spoil=1)
    assert bench.hear() == (0, (GOOD,))
    assert len(bench.client.learnt) == 1


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "198.18.0.9"])
def test_one_private_address_spoils_an_answer(bench: Bench, address: str):
    bench.ask("example.org")
    bench.answer(GOOD, IPv4Address(address))
    assert bench.hear() == (messages.REFUSED, ())
    assert bench.client.refused == [("example.org", "resolves to a private address")]
    assert bench.client.learnt == []


def test_the_machines_own_address_spoils_an_answer_too(bench: Bench):
    bench.ask("example.org")
    bench.answer(GOOD, IPv4Address(OWN))
    assert bench.hear() == (messages.REFUSED, ())
    assert bench.client.refused == [("example.org", "resolves to this machine's own address")]
    assert bench.client.learnt == []


def test_what_cannot_be_opened_is_not_told(bench: Bench):
    bench.client.room = False
    bench.ask("example.org")
    bench.answer(GOOD)
    assert bench.hear() == (messages.SERVER_FAILED, ())


@pytest.mark.parametrize(("ttl_s", "told_s"), [(0, 5), (60, 60), (1 << 31, 3600)])
def test_times_are_kept_in_bounds(bench: Bench, ttl_s: int, told_s: int):
    bench.ask("example.org")
    bench.answer(GOOD, ttl_s=ttl_s)
    assert bench.hear() == (0, (GOOD,))
    assert bench.client.learnt[0][2] == told_s


def test_a_name_that_is_not_there_is_told_as_such(bench: Bench):
    bench.ask("example.org")
    bench.answer(code=messages.NO_SUCH_NAME)
    assert bench.hear() == (messages.NO_SUCH_NAME, ())


def test_open_queries_of_a_sandbox_are_bounded(bench: Bench):
    assert MAX_PENDING + 1 < BURST
    for _ in range(MAX_PENDING + 1):
        bench.ask("example.org")
    assert bench.hear() == (messages.SERVER_FAILED, ())  # the last; the others wait for the nameserver
    bench.answer(GOOD)
    assert bench.hear() == (0, (GOOD,))


def test_after_its_end_it_serves_nobody(bench: Bench):
    bench.resolver.close()
    listener = a_socket()
    with pytest.raises(OSError, match="the resolver has ended"):
        bench.resolver.serve(listener, bench.client)
    assert listener.fileno() < 0


@pytest.mark.parametrize("error", [PermissionError("enter a network namespace"), MemoryError("no memory")])
def test_one_that_cannot_enter_its_network_is_an_error(error: Exception):
    losses = list[str]()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        Resolver(fail, None, SystemClock(), lambda: losses.append("lost"))
    assert not losses


def fail_once(place: object, name: str, error: Exception) -> list[object]:
    """Has the next call of a method raise it; the list says whether it has."""
    real, failed = getattr(place, name), list[object]()

    def call(*args: Any) -> Any:
        if not failed:
            failed.append(args)
            raise error
        return real(*args)

    setattr(place, name, call)
    return failed


@pytest.mark.parametrize("part", ["_selector.select", "_timeout_s", "_give_up_late", "_do_work"])
def test_a_turn_that_fails_is_followed_by_the_next(bench: Bench, part: str):
    """Beside the events of it, whose failures are their own."""
    inner, _, name = part.rpartition(".")
    place = getattr(bench.resolver, inner) if inner else bench.resolver
    failed = fail_once(place, name, MemoryError("no memory"))
    for _ in range(2):
        bench.ask("example.org")
        bench.answer(GOOD)
        assert bench.hear() == (0, (GOOD,))
    assert failed
    assert not bench.losses


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), MemoryError("no memory")])
def test_a_query_whose_answer_nobody_can_hear_is_taken_back(bench: Bench, error: Exception):
    failed = fail_once(bench.resolver._selector, "register", error)
    bench.ask("example.org")
    assert bench.hear() == (messages.SERVER_FAILED, ())
    assert failed
    assert not bench.resolver._queries
    bench.ask("example.org")
    bench.answer(GOOD)
    assert bench.hear() == (0, (GOOD,))


@pytest.mark.parametrize("part", ["register", "unregister"])
def test_a_sandbox_that_asks_too_much_is_heard_again_whatever_fails_meanwhile(bench: Bench, part: str):
    failed = fail_once(bench.resolver._selector, part, MemoryError("no memory"))
    for _ in range(10 * BURST):  # it earns some meanwhile
        was_heard_after = bool(failed)
        bench.ask("example.com")
        assert bench.sandbox.recv(512)[3] & 15 == messages.REFUSED
        if was_heard_after:
            return
    raise AssertionError("it never asked too much")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whose_thread_ends_is_told_and_its_sockets_are_closed(bench: Bench):
    def end() -> None:
        raise SystemExit

    reader, writer = os.pipe()
    bench.resolver.watch(reader, end)
    os.write(writer, b"x")
    bench.resolver._thread.join(10)
    assert bench.losses == ["lost"]
    bench.sandbox.connect(bench.at)
    bench.sandbox.send(b"x")
    with pytest.raises(ConnectionRefusedError):  # or it would hold its network
        bench.sandbox.recv(512)
    with pytest.raises(OSError, match="the resolver has ended"):
        bench.resolver.watch(reader, end)
    bench.stop()
    os.close(reader)
    os.close(writer)


def test_an_end_that_was_asked_for_is_no_loss(bench: Bench):
    bench.resolver.close()
    assert not bench.losses
