"""The process that compiles grammars: a program of its own, run by path, which knows only xgrammar.

What a client sends can take a compiler minutes and gigabytes, and nothing inside a process stops it then.
A grammar that is compiled at once may still take minutes to follow, so some outputs of each are tried too.
Each frame is a length (8 bytes, big-endian) and JSON. In: the vocabulary and the limits, then one request a
grammar. Out: `{"ready": true}`, then for each request `{"grammar": …}`, `{"slow": seconds}`, `{"error": …}`,
or where memory was out `{"short": …}`: whether the machine's, else what it may have. Ends at the end of its
input, by SIGALRM in a grammar that takes too long, and by SIGPROF in one that takes too long to follow.
"""

import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

_MOST_TOKEN_S = 0.05  # of the processor; usual grammars take a hundredth of it at most
_WALKS, _WALK_TOKENS = 6, 24
_MOST_WALKS_S = 1.0  # all of them; the same
_MOST_WARNINGS_BYTES = 1 << 20
_SLACK_BYTES = 4 << 20
# Warnings of what `json_schema` and `pattern` let through on purpose.
_JUDGED = (
    "oneOf", "is not recognized", "should be at the start", "should be at the end",
    "in the middle of regex is ignored",
)  # fmt: skip
_MAX_WHITESPACE = 64  # between the parts of JSON: a model may otherwise write line breaks for ever

# xgrammar 0.2.9 writes strings of bounded length as these characters, which lets in control characters, of
# which no JSON string may have any, and leaves out escapes.
_LOOSE_CHARACTER = r"[^\"\\\r\n]"
_JSON_CHARACTER = r"""([^\0-\x1f\"\\] | "\\" ([\"\\/bfnrt] | "u" [A-Fa-f0-9]{4}))"""


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    start = _read(source)
    if start is None:
        return
    warnings = os.memfd_create("warnings")
    os.dup2(warnings, 2)
    compiler = _compiler(start)
    bound = _limit_memory(start["memory_bytes"])
    _write(sink, {"ready": True})
    while (request := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, start["seconds"])
        answer = _answer(compiler, request, warnings, bound)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sink, answer)


def _compiler(start: dict[str, Any]) -> Any:
    import xgrammar  # pyright: ignore[reportMissingTypeStubs]

    tokens = xgrammar.TokenizerInfo.deserialize_json(start["tokenizer"])
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def _answer(compiler: Any, request: dict[str, Any], warnings: int, bound: int) -> dict[str, Any]:
    try:
        os.ftruncate(warnings, 0)
        os.lseek(warnings, 0, os.SEEK_SET)
        grammar = _compile(compiler, request["kind"], request["source"])
        if said := _left_out(warnings):
            return {"error": f"it cannot be said whole: {said}"}
        if _is_slow(grammar):
            return {"slow": _MOST_TOKEN_S}
        return {"grammar": grammar.serialize_json()}
    except Exception as error:  # the library's errors have no root of their own
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return {"short": _machine_lacks(bound)}
        return {"error": str(error)}


def _compile(compiler: Any, kind: str, source: str) -> Any:
    import xgrammar  # pyright: ignore[reportMissingTypeStubs]

    match kind:
        case "json_schema":
            grammar = xgrammar.Grammar.from_json_schema(source, max_whitespace_cnt=_MAX_WHITESPACE)
            return compiler.compile_grammar(_exact(grammar))
        case "regex":
            return compiler.compile_regex(source)
        case "structural_tag":
            return compiler.compile_grammar(_exact(xgrammar.Grammar.from_structural_tag(source)))
        case _:
            return compiler.compile_grammar(source)


def _left_out(warnings: int) -> str:
    """What the library has warned of, but for what the engine has judged: in no other way does it say that it
    leaves something out."""
    lines = os.pread(warnings, _MOST_WARNINGS_BYTES, 0).decode(errors="replace").splitlines()
    told = [line.partition("Warning: ")[2] for line in lines]
    return next((said for said in told if said and not any(known in said for known in _JUDGED)), "")


def _is_slow(grammar: Any) -> bool:
    """Whether a token of some output takes longer than any should."""
    chance = random.Random(0)  # the same for every try of a grammar
    signal.setitimer(signal.ITIMER_PROF, _MOST_WALKS_S)  # one token may take minutes
    slow = any(_walks_slowly(grammar, chance, repeats=walk % 2 == 1) for walk in range(_WALKS))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return slow


def _walks_slowly(grammar: Any, chance: random.Random, *, repeats: bool) -> bool:
    """One output, of tokens by chance; `repeats`: of the token before where it may come again."""
    import numpy as np
    import xgrammar  # pyright: ignore[reportMissingTypeStubs]

    size = grammar.tokenizer_info.vocab_size
    matcher, bits = xgrammar.GrammarMatcher(grammar), xgrammar.allocate_token_bitmask(1, size)
    token = -1
    for _ in range(_WALK_TOKENS):
        if _takes_long(lambda: matcher.fill_next_token_bitmask(bits)):
            return True
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:size])
        if not len(allowed):
            return False  # a vocabulary that lacks what must come
        if not repeats or token not in allowed:
            token = int(chance.choice(allowed))
        if _takes_long(lambda token=token: matcher.accept_token(token)):
            return True
        if matcher.is_terminated():
            return False
    return False


def _takes_long(work: Callable[[], object]) -> bool:
    started = time.thread_time()
    work()
    return time.thread_time() - started > _MOST_TOKEN_S


def _exact(grammar: Any) -> Any:
    text = str(grammar)
    return text.replace(_LOOSE_CHARACTER, _JSON_CHARACTER) if _LOOSE_CHARACTER in text else grammar


def _limit_memory(more_bytes: int) -> int:
    """What the process may still ask for; how much that is in all. The machine may give it less."""
    bound = _memory_bytes() + more_bytes
    given = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    limit = min([bound, *given])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return bound


def _machine_lacks(bound: int) -> bool:
    """Whether what is left of the process's own bound is not to be had."""
    left = bound - _memory_bytes() - _SLACK_BYTES
    if left <= 0:
        return False
    try:
        mmap.mmap(-1, left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return True
    return False


def _memory_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - nothing but what is needed is imported
        return int(statm.read().split()[0]) * resource.getpagesize()


def _read(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(8)
    return json.loads(source.read(int.from_bytes(head, "big"))) if len(head) == 8 else None


def _write(sink: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    sink.write(len(body).to_bytes(8, "big") + body)
    sink.flush()


if __name__ == "__main__":
    main()
