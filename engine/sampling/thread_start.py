"""Starts threads, and waits for them to be up only so long.

`Thread.start` returns once the thread runs Python. One that finds no memory for its first steps ends without
a word (CPython 3.11), and whoever has started it waits for ever: the engine's thread, with all requests.
"""

import _thread
import queue
import threading

from engine.errors import Overloaded

_UP_S = 5.0  # a machine under load takes milliseconds


def start_thread(thread: threading.Thread) -> None:
    """Raises Overloaded where it is not up within seconds, or none can be had; it is then of no use."""
    told: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    try:
        # Whoever calls `start` may wait for ever: a thread for which nobody waits, so it is no `Thread`.
        _thread.start_new_thread(_start, (thread, told))
        error = told.get(timeout=_UP_S)
    except (MemoryError, RuntimeError) as raised:
        error = raised
    except queue.Empty:
        error = TimeoutError(f"it was not up within {_UP_S:g} s")
    if error is not None:
        raise Overloaded(
            f"there is no thread for the request's grammar: {error or type(error).__name__}",
            hint="try again in a while",
        ) from error


def _start(thread: threading.Thread, told: "queue.SimpleQueue[Exception | None]") -> None:
    try:
        thread.start()
    except Exception as error:  # whatever it is, the one who waits is told
        told.put(error)
    else:
        told.put(None)
