"""Verbs that take several names: as kill(1) does, what cannot be done of one does not keep the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cli.console import fail
from protocol.errors import DockyardError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """`results` in order; `failed` for machines: each name with its error."""

    results: tuple[T, ...]
    failed: tuple[dict[str, Any], ...]

    @property
    def exit_code(self) -> int:
        """1 where one could not be done."""
        return 1 if self.failed else 0


def do_each(names: Sequence[str], do: Callable[[str], T]) -> Done[T]:
    """One after another, each name once. An error is a line at once, and raised where it is the only name's:
    that has an exit code of its own."""
    results, failed = list[T](), list[dict[str, Any]]()
    once = tuple(dict.fromkeys(names))
    for name in once:
        try:
            results.append(do(name))
        except DockyardError as error:
            if len(once) == 1:
                raise
            fail(error, as_json=False)
            failed.append({"name": name, **error.record()})
    return Done(tuple(results), tuple(failed))
