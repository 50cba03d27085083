"""One engine with its loop and its socket. Knows nothing of Ray: hand-offs leave through a callable."""

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.event_publisher import EventPublisher
from actors.token_messages import token_messages
from actors.token_server import TokenServer
from engine.cache.events import EventLog
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextExceeded, GrammarFault, InvalidLogits, InvalidRequest, Overloaded
from engine.handoff import Handoff
from engine.request import Request
from engine.results import StepResult
from protocol.clock import SystemClock
from protocol.errors import DockyardError, ResourceShortage
from protocol.sampling import Structure
from protocol.threads import NoThread, TimelyThread
from protocol.wire import Abort, Failed, FromEngine, Submit

Publish = Callable[[EventLog], EventPublisher]
HandOver = Callable[[Handoff], None]
"""Gives a hand-off away. Whatever it raises ends that request, with `refuse`."""
_MAX_WITHDRAWN = 4096  # far more than hand-offs can be on their way at once
_BALLAST = bytes(64 << 10)  # some 0.1 ms of hashing

_log = logging.getLogger(__name__)


class WorkerFailed(DockyardError):
    """The engine's loop has ended, by `stop` or in an error; the worker answers nothing any more."""


@dataclass(frozen=True, slots=True)
class _Gone:
    client: str


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to run between two steps, in the engine's thread."""

    function: Callable[[], Any]
    done: "Future[Any]"


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The grammar of what waited for it has been compiled, or why not; None: nobody wants it any more."""

    waiting: Submit | Handoff
    grammar: object  # held until its sequence holds it: the engine's thread never compiles one itself


_Message = Submit | Abort | _Gone | _Call | _Compiled


class EngineWorker:
    """The engine's thread owns the engine; every other thread talks to it through the inbox.

    It also builds it. Each thread that has ever entered a parallel region of OpenMP keeps helpers of its own
    (libgomp), and once there are more of them than cores, none spins for the next region any more: waking
    them then takes longer than the work of a decode step (7 ms a token became 13).
    """

    def __init__(
        self,
        config: EngineConfig,
        socket_path: Path,
        hand_over: HandOver | None = None,
        publish: Publish | None = None,
    ) -> None:
        """`publish`: of an engine with `kv_events`, makes what tells of them.

        Blocks until the model is loaded; raises as `Engine`, ResourceShortage where there is no thread, and
        what `publish` raises.
        """
        self._hand_over, self._publish_to = hand_over, publish
        self._publisher: EventPublisher | None = None
        self._clock = SystemClock()
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._server = TokenServer(socket_path, self._receive, lambda client: self._inbox.put(_Gone(client)))
        self._gate = threading.Lock()  # between `call` and the end of the loop
        self._ended = ""  # why no call is answered any more
        self._owned: dict[str, int] = {}  # outputs, by request, that their client waits for from this worker
        # Ids of requests and hand-offs that wait for their grammar, and are not queued yet.
        self._compiling: list[str] = []
        # Requests, and clients, that were given up while a hand-off of theirs may have been on its way.
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._pace = 1.0
        built: Future[None] = Future()
        self._thread = TimelyThread(partial(self._run, config, built), name="engine")
        try:
            self._thread.start()
        except NoThread as error:
            raise ResourceShortage(f"there is no thread for the engine: {error}") from error
        built.result()

    def start(self) -> None:
        """Blocks until the socket accepts connections."""
        try:
            self._server.start()
        except BaseException:
            self._inbox.put(None)
            raise

    def stop(self) -> None:
        """End both threads; requests in flight get no answer. Blocks for at most one step."""
        self._inbox.put(None)
        self._thread.join()
        self._server.stop()
        self.engine.close()
        if self._publisher is not None:
            self._publisher.close()  # last: what the disk's thread has written by then is told too

    def adopt(self, handoff: Handoff) -> None:
        """Take over a request, unless its client has given it up meanwhile. Blocks for a step, until it is
        queued, or waits for its grammar: then this worker itself tells the client what has failed.

        Raises BrokenHandoff, Overloaded, InvalidRequest, WorkerFailed.
        """
        self.call(lambda: self._take_over(handoff))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run something in the engine's thread between two steps and return its result.

        Raises what it raises, and WorkerFailed once the loop has ended.
        """
        done: Future[Any] = Future()
        with self._gate:
            if self._ended:
                raise WorkerFailed(self._ended)
            self._inbox.put(_Call(function, done))
        return done.result()

    def refuse(self, request_id: str, error: BaseException) -> None:
        """Tell the client why its request ends here, or on its way to a decode worker. Any thread."""
        match error:
            case Overloaded():
                failed = Failed(
                    request_id, "overloaded", str(error), retry_after_s=getattr(error, "retry_after_s", 0.0)
                )
            case ContextExceeded():
                failed = Failed(request_id, "context_length_exceeded", str(error), error.parameter)
            case InvalidRequest():
                failed = Failed(request_id, "invalid", str(error), error.parameter)
            case InvalidLogits() | GrammarFault():
                failed = Failed(request_id, "internal", str(error))
            case _:
                failed = Failed(
                    request_id, "lost", f"no decode worker took the hand-off: {error or type(error).__name__}"
                )
        self._server.send([failed])

    def check_integrity(self) -> None:
        """Every block, slot, pin, sequence and stream of the worker is owned or free; raises AssertionError.

        In the engine's thread, between two steps: through `call`.
        """
        self.engine.check_integrity()
        here, compiling = self.engine.outputs, set(self._compiling)
        owned = {name: count for name, count in self._owned.items() if name in here or name not in compiling}
        for name, _ in here.items() ^ owned.items():
            told = f"a client waits for {owned.get(name, 0)} outputs of {name}, {here.get(name, 0)} are here"
            raise AssertionError(told)

    def set_pace(self, factor: float) -> None:
        """Stretch every step to `factor` times its length: 2.0 halves the speed. For experiments.

        The engine's thread stays busy meanwhile, as that of a slower engine would. A pause instead gives its
        core away, and the step after it then takes longer than one in a row of them: the speed would be less
        than half, by how much depends on the machine.
        """
        self._pace = factor

    def _receive(self, message: Submit | Abort) -> None:
        """In the socket's thread. What nobody waits for any more ends between two stages of its step."""
        self._inbox.put(message)
        if isinstance(message, Abort) and message.choice < 0:
            self.engine.interrupt(message.request_id)

    def _run(self, config: EngineConfig, built: "Future[None]") -> None:
        _resolve(lambda: self._build(config), built)
        if built.exception() is None:
            self._loop()

    def _build(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        if self._publish_to is None or self.engine.events is None:
            return
        try:
            self._publisher = self._publish_to(self.engine.events)
        except BaseException:
            self.engine.close()
            raise
        self.engine.events.wake = self._publisher.wake

    def _loop(self) -> None:
        reason = "the worker has been stopped"
        try:
            while self._take_messages():
                started = time.perf_counter()
                result = self.engine.step()
                if self._pace > 1.0 and result.num_rows:
                    _stay_busy((time.perf_counter() - started) * (self._pace - 1.0))
                self._publish(result)
        except Exception as error:  # whatever it is, every request must end
            _log.exception("the engine's loop has ended")
            reason = f"the engine has failed: {type(error).__name__}: {error}"
            self._server.send([Failed(request_id, "internal", reason) for request_id in self._owned])
            self._server.stop()  # a closed socket is how gateways see that this worker serves no more
        self._refuse_calls(reason)

    def _refuse_calls(self, reason: str) -> None:
        """Nobody waits for this thread once it has ended."""
        with self._gate:
            self._ended = reason
        with suppress(queue.Empty):
            while True:
                if isinstance(message := self._inbox.get_nowait(), _Call):
                    message.done.set_exception(WorkerFailed(reason))

    def _take_messages(self) -> bool:
        """Handle what has come in; waits only when there is nothing to run. False at the end."""
        block = not self.engine.has_work
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._handle(message)
            block = False

    def _handle(self, message: _Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id=request_id, choice=choice):
                self._withdraw(request_id, None if choice < 0 else choice)
            case _Compiled(waiting=waiting, grammar=grammar):
                self._go_on_with(waiting, grammar)
            case _Gone(client=client):
                for request_id in [owned for owned in self._owned if owned.startswith(f"{client}/")]:
                    self._withdraw(request_id)
                self._remember(client)
            case _Call(function=function, done=done):
                _resolve(function, done)

    def _submit(self, message: Submit) -> None:
        """Queue a request, after its grammar has been compiled in another thread: it may take seconds."""
        try:
            self._queue(message, message.sampling.structure)
        except Overloaded as error:
            self.refuse(message.request_id, error)

    def _take_over(self, handoff: Handoff) -> None:
        """As `_submit`: whoever calls has few threads, and holds none of them while a grammar is compiled."""
        self._queue(handoff, handoff.header.sampling.structure)

    def _queue(self, waiting: Submit | Handoff, structure: Structure | None) -> None:
        """Now, or once its grammar is there. Raises Overloaded, and of a hand-off what `adopt` does."""
        grammars = self.engine.sampler.grammars
        known = None if structure is None else grammars.known(structure)  # held until its sequence holds it
        if structure is None or known is not None:
            if isinstance(waiting, Submit):
                self._add(waiting)
            else:
                self._adopt(waiting)
            return
        if len(self._compiling) >= self.engine.config.max_waiting:
            raise Overloaded("too many grammars wait to be compiled")
        self._compiling.append(_id_of(waiting))
        if isinstance(waiting, Submit):
            self._owned[waiting.request_id] = waiting.choices
        try:
            grammars.prepare(
                structure, lambda grammar=None: self._inbox.put(_Compiled(waiting, grammar)),
                lambda: self._is_wanted(waiting),
            )  # fmt: skip
        except Overloaded:
            self._compiling.remove(_id_of(waiting))
            if isinstance(waiting, Submit):
                del self._owned[waiting.request_id]
            raise

    def _is_wanted(self, waiting: Submit | Handoff) -> bool:
        """Whether it has not been given up meanwhile. Any thread may ask."""
        if isinstance(waiting, Submit):
            return waiting.request_id in self._owned
        return not self._is_withdrawn(waiting)

    def _is_withdrawn(self, handoff: Handoff) -> bool:
        request_id, choice = handoff.header.request_id, handoff.header.choice
        names = (request_id, f"{request_id}#{choice}", request_id.partition("/")[0])
        return any(name in self._withdrawn for name in names)

    def _go_on_with(self, waiting: Submit | Handoff, outcome: object) -> None:
        """What waited for its grammar is queued or refused; nothing where it has been given up meanwhile."""
        request_id = _id_of(waiting)
        self._compiling.remove(request_id)
        if not self._is_wanted(waiting) or outcome is None:
            return
        if isinstance(waiting, Submit):
            del self._owned[request_id]
        if isinstance(outcome, Exception):
            self.refuse(request_id, outcome)
        elif isinstance(waiting, Submit):
            self._add(waiting)
        else:
            try:
                self._adopt(waiting)
            except DockyardError as error:
                self.refuse(request_id, error)

    def _add(self, message: Submit) -> None:
        try:
            request = Request(
                message.request_id, message.prompt_ids, message.sampling, message.priority,
                message.slack_ms, message.choices, message.cache_salt,
                generated_ids=message.generated_ids, resumed=message.resumed,
            )  # fmt: skip
            self.engine.add(request, message.arrived_ns)
            self._owned[message.request_id] = message.choices
        except (InvalidRequest, Overloaded) as error:
            self.refuse(message.request_id, error)

    def _withdraw(self, request_id: str, choice: int | None = None) -> None:
        is_here = self.engine.abort(request_id, choice)
        if not is_here:
            self._remember(request_id if choice is None else f"{request_id}#{choice}")
        if choice is None:
            self._owned.pop(request_id, None)
        elif is_here:
            self._settle(request_id)

    def _settle(self, request_id: str) -> None:
        """One output of a request has ended, or goes on elsewhere."""
        left = self._owned.pop(request_id, 0) - 1
        if left > 0:
            self._owned[request_id] = left

    def _remember(self, withdrawn: str) -> None:
        self._withdrawn[withdrawn] = None
        if len(self._withdrawn) > _MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)

    def _adopt(self, handoff: Handoff) -> None:
        if self._is_withdrawn(handoff):
            return
        request_id = handoff.header.request_id
        self.engine.adopt(handoff)
        self._owned[request_id] = self._owned.get(request_id, 0) + 1

    def _publish(self, result: StepResult) -> None:
        """Tokens first, so that the client has the first one before the decode worker has the request."""
        now = self._clock.now_ns()
        messages: list[FromEngine] = [
            message for output in result.tokens for message in token_messages(output, now)
        ]
        self._server.send(messages)
        for output in result.tokens:
            if output.finish_reason is not None:
                self._settle(output.request_id)
        for request_id, error in result.failed:
            self._owned.pop(request_id, None)
            self.refuse(request_id, error)
        for handoff in result.handoffs:
            self._settle(handoff.header.request_id)
            self._give(handoff)

    def _give(self, handoff: Handoff) -> None:
        request_id = handoff.header.request_id
        if self._hand_over is None:
            self.refuse(request_id, WorkerFailed("this prefill worker has no decode worker"))
            return
        try:
            self._hand_over(handoff)
        except Exception as error:  # a full object store, say: it ends this request, and no other
            _log.warning("the hand-off of %s has failed", request_id, exc_info=error)
            self.refuse(request_id, error)


def _id_of(waiting: Submit | Handoff) -> str:
    return waiting.header.request_id if isinstance(waiting, Handoff) else waiting.request_id


def _stay_busy(seconds: float) -> None:
    """Keep this thread's core busy without holding the interpreter's lock: hashing lets go of it."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.blake2b(_BALLAST)


def _resolve(function: Callable[[], Any], done: "Future[Any]") -> None:
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)
