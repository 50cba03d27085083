"""Our resolver: the only one that a sandbox has.

It listens on the loopback of the sandbox's own namespace, so a query never leaves it, and which sandbox asks
is plain from the socket. Names that the policy does not allow are never asked for upstream, since a question
alone carries data out. Each query upstream is ours: a fresh socket, a fresh id, and the name as we read it.
Answers in private ranges, and of the machine's own addresses, are refused. One thread does all of it, in the
uplink's namespace.
"""

import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from protocol.clock import Clock
from protocol.threads import NoThread, TimelyThread
from sandbox.egress import messages
from sandbox.egress.messages import Question
from sandbox.egress.rules import is_private, prefix_of
from sandbox.forks import close_left

LISTEN_AT = ("127.0.0.1", 53)  # in the sandbox's namespace
PATIENCE_NS = 4_000_000_000
MAX_PENDING = 32  # queries of one sandbox at a time
BURST, A_SECOND = 200, 50  # messages of one sandbox
REST_NS = 200_000_000  # of a socket whose sandbox asks too much; the kernel drops what does not fit meanwhile
_REST_S = 0.2  # of the thread, where a whole turn fails: the next one may
LEAST_TTL_S, MOST_TTL_S = 5, 3600
_log = logging.getLogger("dockyard.sandbox")
_KINDS = (messages.A, messages.AAAA)
_BATCH = 16  # queries of one sandbox before others have their turn


class Client(Protocol):
    """A sandbox, as the resolver knows it. Methods run on the resolver's thread and do not block."""

    def allows_name(self, name: str) -> bool:
        """Whether its policy has a rule for the name."""
        ...

    def is_own(self, address: messages.Address) -> bool:
        """Whether it is the uplink's own, which counts as private."""
        ...

    def learn(self, name: str, addresses: tuple[messages.Address, ...], ttl_s: int) -> bool:
        """Opens what the policy says for the name; False when there is no room, or the policy has changed."""
        ...

    def refuse_name(self, name: str, why: str) -> None:
        """Records a refusal."""
        ...


@dataclass(slots=True, eq=False)
class _Server:
    """One sandbox's socket, with its share of queries."""

    socket: socket.socket
    client: Client
    tokens: float = BURST
    refilled_ns: int = 0
    pending: "set[_Query]" = field(default_factory=set["_Query"])


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sandbox's question, and the program that waits for the answer."""

    question: Question
    asker: tuple[str, int]


@dataclass(slots=True, eq=False)
class _Query:
    server: _Server
    asked: _Asked
    id: int
    upstream: socket.socket
    deadline_ns: int


class Resolver:
    """Thread-safe. `upstream` is asked for allowed names; None: nothing resolves."""

    def __init__(
        self,
        enter: Callable[[], None],
        upstream: tuple[str, int] | None,
        clock: Clock,
        on_loss: Callable[[], None],
    ) -> None:
        """`enter` puts the resolver's thread in the uplink's namespace; what it raises is raised here, and
        OSError where there is no thread. `on_loss` is called on the thread where that ends unasked: nobody
        hears of what it watched any more."""
        self._enter, self._upstream, self._clock, self._on_loss = enter, upstream, clock, on_loss
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        self._lock = threading.Lock()  # guards what follows, but that the thread takes work without it
        self._work: deque[Callable[[], None]] = deque()
        self._closed = self._ended = False
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._queries: set[_Query] = set()  # of the thread, as what follows
        self._resting: dict[_Server, int] = {}  # until when, as what follows
        self._again: dict[Callable[[], None], int] = {}
        self._thread = TimelyThread(self._run, name="resolver")
        try:
            self._thread.start()
        except NoThread as error:
            self._selector.close()
            os.close(self._wake)
            raise OSError(errno.EAGAIN, f"{error} for the resolver") from error
        self._ready.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Has the thread call `on_ready` whenever `fd` is readable. OSError when it cannot."""
        if not self._do(lambda: self._selector.register(fd, selectors.EVENT_READ, on_ready)):
            raise OSError(errno.EBADF, "the resolver has ended")

    def try_again(self, work: Callable[[], None]) -> None:
        """On its thread: has `work` called there once more, after a moment."""
        self._again[work] = self._clock.now_ns() + REST_NS

    def serve(self, listener: socket.socket, client: Client) -> Callable[[], None]:
        """Answers what comes in at a bound UDP socket, which is the resolver's from now on. Returns what ends
        that: a call that blocks until the socket is closed, idempotent. OSError when it cannot; the socket is
        closed then."""
        server = _Server(listener, client, refilled_ns=self._clock.now_ns())
        try:
            listener.setblocking(False)
            if not self._do(lambda: self._listen(server)):
                raise OSError(errno.EBADF, "the resolver has ended")
        except OSError:
            listener.close()
            raise

        def stop() -> None:
            self._do(lambda: self._end(server))

        return stop

    def _listen(self, server: _Server) -> None:
        self._selector.register(server.socket, selectors.EVENT_READ, lambda: self._take(server))

    def close(self) -> None:
        """Ends the thread and closes all sockets. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def leave(self) -> None:
        """In a child of a fork, which has not the thread. What is watched stays so, by the parent's."""
        is_closed, self._closed = self._closed, True
        self._lock, self._work = threading.Lock(), deque()
        if is_closed:
            return
        self._close_sockets()
        self._selector.close()
        close_left(self._wake)

    def _do(self, work: Callable[[], object]) -> bool:
        """Has the thread do it, and waits. False when it has ended. Raises what `work` raises."""
        done, errors = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                work()
            except Exception as error:  # handed to who waits
                errors.append(error)
            finally:
                done.set()

        with self._lock:
            if self._closed or self._ended:
                return False
            self._work.append(run)
        os.eventfd_write(self._wake, 1)
        done.wait()
        if errors:
            raise errors[0]
        return True

    def _run(self) -> None:
        with ExitStack() as at_end:  # the last one first, and each whatever another raises
            at_end.callback(self._close_sockets)
            at_end.callback(self._do_work)  # what was asked for before the end: nobody waits for ever
            at_end.callback(self._end_work)
            try:
                self._enter()
            except Exception as error:  # handed to who waits
                self._failure = error
                return
            finally:
                self._ready.set()
            while not self._closed:
                self._take_turn()

    def _end_work(self) -> None:
        with self._lock:
            self._ended, is_lost = True, not self._closed and self._failure is None
        if is_lost:
            self._on_loss()

    def _close_sockets(self) -> None:
        sockets = [key.fileobj for key in self._selector.get_map().values()]
        for each in (*sockets, *(server.socket for server in self._resting)):
            if isinstance(each, socket.socket):
                each.close()

    def _take_turn(self) -> None:
        """What goes wrong with one event, for want of memory say, is its own: all have this thread. What goes
        wrong beside them is tried again."""
        try:
            self._do_work()
            for key, _ in self._selector.select(self._timeout_s()):
                try:
                    cast("Callable[[], None]", key.data)()
                except Exception:
                    _report()
            self._give_up_late()
        except Exception:
            _report()
            time.sleep(_REST_S)

    def _timeout_s(self) -> float | None:
        until_ns = (*self._resting.values(), *self._again.values())
        first_ns = min((*(query.deadline_ns for query in self._queries), *until_ns), default=None)
        return None if first_ns is None else max(0.0, (first_ns - self._clock.now_ns()) / 1e9)

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _do_work(self) -> None:
        """Each turn, whether it was woken or not: a wake may be lost in an error."""
        while self._work:
            self._work.popleft()()

    def _take(self, server: _Server) -> None:
        if server.socket.fileno() < 0:
            return  # ended by an event of this very round, as below
        for _ in range(_BATCH):
            if not self._has_token(server):
                self._resting[server] = self._clock.now_ns() + REST_NS
                self._unregister(server.socket)
                return
            try:
                message, asker = server.socket.recvfrom(messages.MAX_MESSAGE_BYTES)
            except OSError:
                server.tokens += 1
                return  # nothing more for now
            try:
                question = messages.read_question(message)
            except ValueError:
                continue  # not worth an answer
            self._answer(server, _Asked(question, asker))

    def _answer(self, server: _Server, asked: _Asked) -> None:
        question = asked.question
        if not server.client.allows_name(question.name):
            server.client.refuse_name(question.name, "is not allowed")
            _reply(server, asked, messages.REFUSED)
        elif question.type not in _KINDS:
            _reply(server, asked, messages.NO_ERROR)
        elif self._upstream is None or len(server.pending) >= MAX_PENDING:
            _reply(server, asked, messages.SERVER_FAILED)
        else:
            self._ask(server, asked, self._upstream)

    def _has_token(self, server: _Server) -> bool:
        now_ns = self._clock.now_ns()
        earned = (now_ns - server.refilled_ns) / 1e9 * A_SECOND
        server.tokens, server.refilled_ns = min(BURST, server.tokens + earned), now_ns
        if server.tokens < 1:
            return False
        server.tokens -= 1
        return True

    def _ask(self, server: _Server, asked: _Asked, upstream: tuple[str, int]) -> None:
        question = asked.question
        ident = secrets.randbelow(1 << 16)
        family = socket.AF_INET6 if ":" in upstream[0] else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        except OSError:
            _reply(server, asked, messages.SERVER_FAILED)
            return
        query = _Query(server, asked, ident, sock, self._clock.now_ns() + PATIENCE_NS)
        try:
            sock.connect(upstream)  # the kernel draws the port, and takes answers from nobody else
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(query))
            self._queries.add(query)
            server.pending.add(query)
            sock.send(messages.write_question(ident, question.name, question.type))
        except (OSError, ValueError, MemoryError):
            self._finish(query, messages.SERVER_FAILED)

    def _hear(self, query: _Query) -> None:
        if query not in self._queries:
            return
        question = query.asked.question
        try:
            message = query.upstream.recv(messages.MAX_MESSAGE_BYTES)
            kind = messages.A if question.type == messages.A else messages.AAAA
            answer = messages.read_answer(message, query.id, question.name, kind)  # pyright: ignore[reportArgumentType]
        except BlockingIOError:
            return
        except OSError:
            self._finish(query, messages.SERVER_FAILED)
            return
        except ValueError:
            return  # someone else's; ours may still come
        if answer.code != messages.NO_ERROR or not answer.addresses:
            self._finish(query, answer.code)
        elif any(is_private(prefix_of(each)) for each in answer.addresses):
            query.server.client.refuse_name(question.name, "resolves to a private address")
            self._finish(query, messages.REFUSED)
        elif any(map(query.server.client.is_own, answer.addresses)):
            query.server.client.refuse_name(question.name, "resolves to this machine's own address")
            self._finish(query, messages.REFUSED)
        else:
            ttl_s = min(max(answer.ttl_s, LEAST_TTL_S), MOST_TTL_S)
            learnt = query.server.client.learn(question.name, answer.addresses, ttl_s)
            code = messages.NO_ERROR if learnt else messages.SERVER_FAILED
            self._finish(query, code, answer.addresses if learnt else (), ttl_s)

    def _give_up_late(self) -> None:
        now_ns = self._clock.now_ns()
        for query in [each for each in self._queries if each.deadline_ns <= now_ns]:
            self._finish(query, messages.SERVER_FAILED)
        for server in [each for each, until_ns in self._resting.items() if until_ns <= now_ns]:
            with suppress(KeyError):  # it listens still
                self._listen(server)
            del self._resting[server]
        for work in [each for each, until_ns in self._again.items() if until_ns <= now_ns]:
            del self._again[work]
            work()

    def _finish(
        self, query: _Query, code: int, addresses: tuple[messages.Address, ...] = (), ttl_s: int = 0
    ) -> None:
        self._forget(query)
        _reply(query.server, query.asked, code, addresses, ttl_s)

    def _forget(self, query: _Query) -> None:
        self._queries.discard(query)
        query.server.pending.discard(query)
        self._unregister(query.upstream)
        query.upstream.close()

    def _unregister(self, sock: socket.socket) -> None:
        with suppress(KeyError):  # it could not be registered
            self._selector.unregister(sock)

    def _end(self, server: _Server) -> None:
        if server.socket.fileno() < 0:
            return
        try:
            while server.pending:
                self._forget(next(iter(server.pending)))
            self._resting.pop(server, None)
            self._unregister(server.socket)
        finally:
            server.socket.close()


def _report() -> None:
    with suppress(Exception):  # for want of memory, too
        _log.exception("a resolver of sandboxes goes on")


def _reply(
    server: _Server,
    asked: _Asked,
    code: int,
    addresses: tuple[messages.Address, ...] = (),
    ttl_s: int = 0,
) -> None:
    with suppress(OSError):  # it does not listen any more
        server.socket.sendto(messages.write_reply(asked.question, code, addresses, ttl_s), asked.asker)
