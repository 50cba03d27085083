"""Messages between the agents of one team: bounded boxes, one order for all.

A message stays in the receiver's box until it is taken, so that a note which comes early is not lost to the
one who will wait for it later. With a journal, every message is on disk before its receiver can see it.
"""

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from protocol.errors import DockyardError, InvalidInput


class MailboxFullError(DockyardError):
    """The receiver has not taken its earlier messages. The sender goes on and may try again."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `number` is its place in the order of the whole team, from 1."""

    number: int
    sender: str
    receiver: str
    text: str
    source_interval: str  # the sender's interval in which it was sent


class Mailbox:
    """The boxes of all agents of a team.

    Belongs to one event loop; no call blocks (the journal is flushed, not synced). The journal is a
    record for people: a run starts with empty boxes, and refuses a journal that exists (`InvalidInput`).
    """

    def __init__(self, *, capacity: int = 32, max_chars: int = 2_000, journal: Path | None = None) -> None:
        if capacity < 1:
            raise InvalidInput(f"capacity {capacity} of a mailbox must be at least 1")
        self._capacity = capacity
        self._max_chars = max_chars
        self._boxes: dict[str, deque[Message]] = {}
        self._number = 0
        self._journal: TextIO | None = None
        if journal is not None:
            self._journal = _create(journal)

    def open_box(self, owner: str) -> None:
        """Makes an empty box; one that is there stays as it is."""
        self._boxes.setdefault(owner, deque())

    def send(self, sender: str, receiver: str, text: str, source_interval: str) -> Message:
        """Puts a message into the receiver's box.

        Raises `MailboxFullError` where the box is, and `InvalidInput` for a receiver without one or a text
        of too many characters: a note is for pointers, work travels as diffs.
        """
        box = self._boxes.get(receiver)
        if box is None:
            known = ", ".join(sorted(self._boxes))
            raise InvalidInput(f"nobody is called {receiver!r}", hint=f"known: {known}")
        if len(text) > self._max_chars:
            raise InvalidInput(f"the text has {len(text)} characters", hint=f"at most {self._max_chars}")
        if len(box) >= self._capacity:
            raise MailboxFullError(
                f"the mailbox of {receiver} holds {len(box)} messages", hint="wait, then send again"
            )
        self._number += 1
        message = Message(self._number, sender, receiver, text, source_interval)
        self._note({"sent": asdict(message)})
        box.append(message)
        return message

    def pending(self, owner: str) -> int:
        """How many messages wait in the owner's box."""
        return len(self._boxes[owner])

    def take(self, owner: str) -> list[Message]:
        """Empties the owner's box, oldest message first."""
        box = self._boxes[owner]
        messages = list(box)
        if messages:
            self._note({"taken": owner, "up_to": messages[-1].number})
        box.clear()
        return messages

    def close(self) -> None:
        """Closes the journal. May be called again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _note(self, entry: dict[str, object]) -> None:
        if self._journal is not None:
            self._journal.write(json.dumps(entry) + "\n")
            self._journal.flush()


def _create(journal: Path) -> TextIO:
    try:
        return journal.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise InvalidInput(f"mail journal {journal} exists already", hint="choose a new path") from error
