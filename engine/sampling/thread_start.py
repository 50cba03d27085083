"""Starts the threads that grammars need."""

from engine.errors import Overloaded
from protocol.threads import NoThread, TimelyThread


def start_thread(thread: TimelyThread) -> None:
    """Blocks until it is up, seconds at most. Raises Overloaded where none can be had; it is then of no
    use."""
    try:
        thread.start()
    except NoThread as error:
        raise Overloaded(
            f"there is no thread for the request's grammar: {error}", hint="try again in a while"
        ) from error
