"""What the machine lacks is no grammar's fault; and a refusal names the field of its own request."""

import errno
import os
import queue
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tiny_gguf import EOS

from engine.chat.tokenizer import ChatTokenizer
from engine.errors import CompilingFailed, InvalidRequest, Overloaded
from engine.sampling.grammar_compiler import CompileLimits, GrammarCompiler
from engine.sampling.grammars import Grammars
from protocol.sampling import Structure

AB = Structure("regex", "[ab]+")
HEAVY = Structure("regex", "(([a-c]{1,90}d){1,90}e){1,40}")


@pytest.fixture
def grammars(tiny_tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    made = Grammars(tiny_tokenizer.token_bytes, {EOS})
    yield made
    made.close()


def process_of(grammars: Grammars) -> "subprocess.Popen[bytes]":
    grammars.compile(AB)
    assert grammars._compiler is not None
    assert grammars._compiler._process is not None
    return grammars._compiler._process


def test_a_grammar_beyond_its_own_bound_is_the_clients_and_beyond_the_machines_is_not(
    grammars: Grammars, tiny_tokenizer: ChatTokenizer
) -> None:
    bounded = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(memory_bytes=24 << 20))
    with pytest.raises(CompilingFailed, match="more memory than a grammar may have"):
        bounded.compile(HEAVY)
    bounded.close()
    process = process_of(grammars)
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    given = pages * resource.getpagesize() + (24 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (given, given))
    with pytest.raises(Overloaded, match="no memory for another grammar"):
        grammars.compile(HEAVY)
    assert grammars.known(HEAVY) is None


def test_a_machine_that_gives_less_than_a_grammar_may_have_compiles_what_fits(
    tiny_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the process: no limit is raised above what it has got."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **named: popen(["prlimit", f"--as={4 << 30}", *words], **named)
    )
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(memory_bytes=1 << 40))
    try:
        assert grammars.compile(AB) is not None
    finally:
        grammars.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE])
def test_a_process_that_cannot_be_started_blames_no_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object, **named: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
        grammars.prepare(AB, outcomes.put)
        assert type(outcomes.get(timeout=60)) is Overloaded
    assert grammars.compile(AB) is not None


@pytest.mark.parametrize(("program", "start_s"), [("/bin/false", 60.0), (None, 0.0)])
def test_a_process_that_does_not_come_up_blames_no_grammar(
    tiny_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, program: str | None, start_s: float
) -> None:
    if program is not None:
        monkeypatch.setattr("sys.executable", program)
    grammars = Grammars(tiny_tokenizer.token_bytes, {EOS}, CompileLimits(start_s=start_s))
    with pytest.raises(Overloaded, match="up"):
        grammars.compile(AB)
    assert grammars.known(AB) is None
    grammars.close()


def test_a_process_that_the_system_kills_blames_no_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the machine's memory is out."""
    process, send = process_of(grammars), GrammarCompiler._send

    def killed(compiler: GrammarCompiler, message: dict[str, object]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        send(compiler, message)

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "_send", killed)
        with pytest.raises(Overloaded, match="was killed"):
            grammars.compile(Structure("regex", "c"))
    assert grammars.compile(Structure("regex", "c")) is not None


def test_each_refusal_names_the_field_of_its_own_request(grammars: Grammars) -> None:
    fields = ("response_format", "structured_outputs", "tools")
    bad = [Structure("regex", "a(", field) for field in fields]
    held: list[object] = []
    for structure in bad * 2:
        with pytest.raises(InvalidRequest) as refused:
            grammars.compile(structure)
        assert refused.value.parameter == structure.field
        assert str(refused.value).startswith(f"{structure.field}: the regex cannot be compiled: ")
        assert str(refused.value).count(": the regex") == 1
        held.append(grammars.known(structure))  # it is answered from this one from now on
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    grammars.prepare(bad[1], outcomes.put)
    assert str(outcomes.get(timeout=60)).startswith("structured_outputs: the regex")
