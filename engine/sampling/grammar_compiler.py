"""The engine's end of the process that compiles grammars: starts it, asks it, outlives it."""

import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CompilingFailed, InvalidRequest, Overloaded
from protocol.clock import Clock
from protocol.errors import DockyardError
from protocol.sampling import Structure

_PROGRAM = Path(__file__).with_name("grammar_process.py")
_OBJECT = '{"type": "object", "additionalProperties": true}'
SIMPLER = "use a simpler one: fewer properties, repetitions and alternatives"
_SHORTAGES = {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE}  # of memory, processes, descriptors
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # where in the library's source an error comes from


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Of one grammar. The defaults leave room for schemas of some hundred properties."""

    source_bytes: int = 128 << 10
    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    grammar_bytes: int = 32 << 20  # as it crosses to the engine
    start_s: float = 60.0  # for the process to be up


class GrammarCompiler:
    """One process, started at the first grammar and again after one that it did not survive.

    Not thread-safe. Use `close`; without it the process ends with its owner's, whose pipe it reads.
    """

    def __init__(self, tokenizer: str, limits: CompileLimits, clock: Clock) -> None:
        """`tokenizer`: xgrammar's TokenizerInfo, serialised."""
        self._tokenizer, self._limits, self._clock = tokenizer, limits, clock
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, structure: Structure) -> str:
        """The compiled grammar, serialised. Raises InvalidRequest, and Overloaded for what the machine lacks;
        blocks for at most the limits' times."""
        kind, source = structure.kind, structure.source
        if kind == "json_object":
            kind, source = "json_schema", _OBJECT
        answer = self._ask(structure, kind, source)
        if answer.get("short", False):
            raise _lacking("there is no memory for another grammar")
        if "short" in answer:
            raise _failed(structure, "it takes more memory than a grammar may have")
        if "slow" in answer:
            cause = f"it takes too long to follow, over {answer['slow']:g} s for one token"
            raise refused(structure, cause, SIMPLER)
        if "error" in answer:
            raise refused(structure, _cause(answer["error"]))
        return answer["grammar"]

    def kill(self) -> None:
        """End the process from any thread: who waits for a grammar is refused it."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, structure: Structure, kind: str, source: str) -> dict[str, Any]:
        """Where this raises the process ends: what is left in its pipes would be taken for another's."""
        try:
            deadline = self._start()
            self._send({"kind": kind, "source": source})
            late = f"it takes more than {self._limits.seconds:g} s to compile"
            return self._receive(structure, deadline, late)
        except BaseException:
            self.close()
            raise

    def _start(self) -> float:
        """Bring the process up. The time until which a grammar sent now may take. Raises Overloaded where it
        does not come up: no grammar has been looked at by then."""
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                raise _lacking(f"what compiles grammars cannot be started: {error.strerror}") from error
            limits = {"seconds": self._limits.seconds, "memory_bytes": self._limits.memory_bytes}
            self._send({"tokenizer": self._tokenizer, **limits})
            self._await_ready(self._now_s() + self._limits.start_s)
        return self._now_s() + self._limits.seconds + 1.0  # the process itself ends a moment earlier

    def _await_ready(self, deadline: float) -> None:
        try:
            self._read(int.from_bytes(self._read(8, deadline), "big"), deadline)
        except TimeoutError:
            late = f"what compiles grammars was not up within {self._limits.start_s:g} s"
            raise _lacking(late) from None
        except EOFError:
            raise _lacking("what compiles grammars has ended before it was up") from None

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        with suppress(BrokenPipeError):  # what it has to say about that is read next
            self._process.stdin.write(len(body).to_bytes(8, "big") + body)
            self._process.stdin.flush()

    def _receive(self, structure: Structure, deadline: float, late: str) -> dict[str, Any]:
        """`late`: what is wrong where the deadline passes."""
        try:
            length = int.from_bytes(self._read(8, deadline), "big")
            if length <= self._limits.grammar_bytes:
                return json.loads(self._read(length, deadline))
        except TimeoutError:
            raise _failed(structure, late) from None
        except EOFError:
            raise self._ended(structure) from None
        cause = f"compiled it takes {length} bytes, more than {self._limits.grammar_bytes}"
        raise refused(structure, cause, SIMPLER)

    def _ended(self, structure: Structure) -> DockyardError:
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGKILL:  # by the system, whose memory is out; or the engine is being closed
            return _lacking("what compiles grammars was killed while it compiled this one")
        if code == -signal.SIGPROF:
            return refused(structure, "it takes too long to follow, over a second for a few tokens", SIMPLER)
        cause = f"it takes more than {self._limits.seconds:g} s or too much memory to compile"
        return _failed(structure, cause)

    def _read(self, count: int, deadline: float) -> bytes:
        """Raises TimeoutError, and EOFError where the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        while len(parts) < count:
            ready, _, _ = select.select([descriptor], [], [], max(deadline - self._now_s(), 0.0))
            if not ready:
                raise TimeoutError
            part = os.read(descriptor, count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def refused(structure: Structure, cause: str, hint: str = "") -> InvalidRequest:
    """The error of a structure that cannot be compiled: its field, its kind, and why."""
    return InvalidRequest(
        f"{structure.field}: the {structure.kind} cannot be compiled: {_shown(cause)}",
        parameter=structure.field, hint=hint,
    )  # fmt: skip


def _lacking(cause: str) -> Overloaded:
    return Overloaded(cause, hint="try again in a while")


def _failed(structure: Structure, cause: str) -> CompilingFailed:
    error = refused(structure, cause, SIMPLER)
    return CompilingFailed(error.message, parameter=error.parameter, hint=error.hint)


def _shown(cause: str) -> str:
    """What has no UTF-8, and could reach no client, as its escape."""
    return cause.encode(errors="backslashreplace").decode()


def _cause(error: str) -> str:
    text = _ORIGIN.sub("", error.strip())
    text = text.partition("The JSON string is:")[0].strip()
    return text if len(text) <= 300 else f"{text[:300]} …"
