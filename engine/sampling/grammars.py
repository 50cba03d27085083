"""Compiled grammars, each compiled once: by the bytes of its source, bounded by the bytes that they take."""

import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from engine.errors import CompilingFailed, GrammarFault, InvalidRequest, Overloaded
from engine.sampling.grammar_compiler import SIMPLER, CompileLimits, GrammarCompiler, refused
from engine.sampling.json_schema import check_regex, read_schema
from engine.sampling.matcher import GrammarMatcher
from engine.sampling.thread_start import start_thread
from engine.sampling.watch import Watch
from engine.shortage import is_out_of_memory
from protocol.clock import Clock, SystemClock
from protocol.sampling import Structure
from protocol.threads import TimelyThread

_log = logging.getLogger(__name__)

_Key = tuple[str, str]
_Error = TypeVar("_Error", bound=Exception)
_MAX_CACHE_BYTES = 64 << 20
_MAX_HELD_BYTES = 256 << 20  # of those that requests hold, and those that are kept
_MAX_REFUSALS = 256
_PASSING_NS = 30 * 10**9  # a refusal for want of time or memory: another moment may have more of them


class Grammars:
    """Thread-safe. Compiling blocks whoever asks for it; `prepare` has a thread of its own do so.

    xgrammar is imported at the first grammar: it takes half a second, and most engines need none.
    """

    def __init__(
        self,
        tokens: Callable[[], Sequence[bytes]],
        ends: Collection[int],
        limits: CompileLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`tokens`: of each id of the vocabulary its bytes, none where it is never part of text."""
        self._tokens, self._ends = tokens, sorted(ends)
        self._limits, self._clock = limits or CompileLimits(), clock or SystemClock()
        self._lock = threading.Lock()  # around compiling
        self._refusing = threading.Lock()
        self._compiled: OrderedDict[_Key, Any] = OrderedDict()
        # Those that somebody holds, a sequence say: a grammar in use is never compiled again.
        self._held: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        # Why, and until when (nanoseconds of the clock) it is not tried again.
        self._refused: OrderedDict[_Key, tuple[str, float]] = OrderedDict()
        self._held_refusals: WeakValueDictionary[_Key, InvalidRequest] = WeakValueDictionary()
        self._bytes = 0
        self._vocabulary = 0
        self._tokenizer: Any = None
        self._compiler: GrammarCompiler | None = None
        self._queueing = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None  # while something is queued
        self._watch = Watch()  # over the matchers, which are the engine's thread's

    def known(self, structure: Structure) -> object:
        """The grammar or the refusal that `compile` answers with at once; while it is held, it goes on doing
        so, however many others come between. None where it would have to compile."""
        key = _key(structure)
        if (cause := self._refusal(key)) is None:
            return self._known(key)
        held = self._held_refusals.get(key)
        if held is None:
            held = self._held_refusals[key] = _refusal_of(structure, cause)
        return held

    def compile(self, structure: Structure) -> Any:
        """The compiled grammar. Raises InvalidRequest that names the field and the cause; Overloaded where
        those that requests hold take too much memory for another."""
        key = _key(structure)
        if (cause := self._refusal(key)) is not None:  # first: one that has been condemned may be held still
            raise _refusal_of(structure, cause)
        if (grammar := self._known(key)) is not None:
            return grammar
        with self._lock:
            if (grammar := self._known(key)) is None:  # nobody else has compiled it meanwhile
                self._check_room()
                self._watch.start()  # here, where no step waits for it
                grammar = self._compile(structure)
                self._keep(key, grammar)
            return grammar

    def prepare(
        self, structure: Structure, done: Callable[[object], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Compile in another thread, then call `done` there with what has come of it, the grammar or an
        error: a refusal, Overloaded, GrammarFault. While a grammar or a refusal is held, `compile` answers
        at once, however many others come between.

        `wanted`: whether anybody still waits, asked there when its turn has come; else nothing is compiled,
        and `done` gets None. Raises Overloaded where no thread is to be had; then `done` is not called.
        """
        with self._queueing:
            if self._thread is None or not self._thread.is_alive():
                thread = TimelyThread(self._work_off, name="grammars", daemon=False)
                start_thread(thread)
                self._thread = thread
            self._queue.append(lambda: self._prepare(structure, done, wanted))

    def matcher(self, structure: Structure) -> GrammarMatcher:
        """At the start of the structure, or of the reasoning before it. Raises as `compile`."""
        return GrammarMatcher(
            self.compile(structure), structure, self._vocabulary, self._ends,
            watch=self._watch, condemn=lambda cause: self._condemn(structure, cause),
        )  # fmt: skip

    def close(self) -> None:
        """End the compiling process and thread. Blocks until they have, which is soon."""
        self._watch.close()
        if self._compiler is not None:
            self._compiler.kill()
        with self._queueing:
            self._queue.clear()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()

    def _work_off(self) -> None:
        """What is queued, in the thread that is for it."""
        while True:
            with self._queueing:
                if not self._queue:
                    self._thread = None
                    return
                work = self._queue.popleft()
            try:
                work()
            except Exception:  # whoever waits has been told what could be told
                _log.exception("nobody could be told of a grammar")
            del work  # it holds who waits

    def _prepare(
        self, structure: Structure, done: Callable[[object], None], wanted: Callable[[], bool]
    ) -> None:
        outcome: object = None
        try:
            if wanted():
                outcome = self.compile(structure)
        except InvalidRequest as error:
            outcome = self._held_refusals[_key(structure)] = _bare(error)
        except Overloaded as error:
            outcome = _bare(error)
        except Exception as error:  # whoever waits for it is told
            if is_out_of_memory(error):
                outcome = Overloaded("no memory for another grammar")
            else:
                _log.exception("a grammar could not be compiled")
                outcome = GrammarFault(f"its grammar could not be compiled: {type(error).__name__}: {error}")
        finally:
            done(outcome)

    def _known(self, key: _Key) -> Any:
        grammar = self._compiled.get(key)
        return self._held.get(key) if grammar is None else grammar

    def _refusal(self, key: _Key) -> str | None:
        """The cause, without the field of the request whose it was."""
        if (held := self._held_refusals.get(key)) is not None:
            return str(held).removeprefix(f"{held.parameter}: ")
        cause, until = self._refused.get(key, ("", 0.0))
        return cause if self._clock.now_ns() < until else None

    def _check_room(self) -> None:
        taken = sum(grammar.memory_size_bytes for grammar in list(self._held.values()))
        if taken >= _MAX_HELD_BYTES:
            raise Overloaded(f"the grammars of requests that run or wait take {taken} bytes")

    def _compile(self, structure: Structure) -> Any:
        try:
            size = len(_utf8(structure))
            if size > self._limits.source_bytes:
                raise refused(structure, f"it has {size} bytes, more than {self._limits.source_bytes}")
            if structure.kind in ("json_schema", "structural_tag"):
                return self._compiled_by_process(read_schema(structure))
            if structure.kind == "regex":
                check_regex(structure)
            return self._compiled_by_process(structure)
        except InvalidRequest as error:
            lasts = _PASSING_NS if isinstance(error, CompilingFailed) else math.inf
            self._remember(structure, str(error), self._clock.now_ns() + lasts)
            raise

    def _condemn(self, structure: Structure, cause: str) -> None:
        """It has been compiled, and shown itself too slow to follow."""
        self._remember(structure, str(refused(structure, cause, SIMPLER)), math.inf)

    def _remember(self, structure: Structure, cause: str, until: float) -> None:
        with self._refusing:
            self._refused[_key(structure)] = cause.removeprefix(f"{structure.field}: "), until
            if len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)

    def _compiled_by_process(self, structure: Structure) -> Any:
        import xgrammar  # pyright: ignore[reportMissingTypeStubs]

        if self._compiler is None:
            tokens = list(self._tokens())
            self._vocabulary = len(tokens)
            self._tokenizer = xgrammar.TokenizerInfo(
                tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=self._ends
            )
            self._compiler = GrammarCompiler(self._tokenizer.serialize_json(), self._limits, self._clock)
        serialised = self._compiler.compile(structure)
        return xgrammar.CompiledGrammar.deserialize_json(serialised, self._tokenizer)

    def _keep(self, key: _Key, grammar: Any) -> None:
        """Least recently compiled goes first; sequences that follow one keep it alive."""
        self._compiled[key] = self._held[key] = grammar
        self._bytes += grammar.memory_size_bytes
        while self._bytes > _MAX_CACHE_BYTES and len(self._compiled) > 1:
            _, dropped = self._compiled.popitem(last=False)
            self._bytes -= dropped.memory_size_bytes


def _bare(error: _Error) -> _Error:
    """Without its frames, which would hold what was compiled."""
    error.__traceback__ = None
    return error


def _refusal_of(structure: Structure, cause: str) -> InvalidRequest:
    return InvalidRequest(f"{structure.field}: {cause}", parameter=structure.field)


def _utf8(structure: Structure) -> bytes:
    try:
        return structure.source.encode()
    except UnicodeEncodeError as error:
        raise refused(structure, f"it has half a surrogate pair, which has no UTF-8: {error}") from error


def _key(structure: Structure) -> _Key:
    return structure.kind, structure.source
