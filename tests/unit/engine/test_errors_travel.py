"""Errors cross process borders (Ray pickles them): nothing that they say is lost on the way."""

import pickle
from collections.abc import Iterator

import pytest

import engine.errors
import protocol.errors
from actors.engine_worker import WorkerFailed
from actors.token_client import RequestFailed
from engine.errors import InvalidRequest
from protocol.errors import DockyardError
from protocol.wire import Failed
from sandbox.errors import FileMissing


def errors() -> Iterator[DockyardError]:
    for module in (protocol.errors, engine.errors):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, DockyardError):
                extra = {"parameter": "n"} if issubclass(kind, InvalidRequest) else {}
                yield kind("what is wrong", hint="the way out", **extra)
    yield WorkerFailed("gone", hint="wait")
    yield RequestFailed(Failed("r", "overloaded", "later", "n"))
    yield FileMissing("no a.py", path="a.py", number=2, hint="write it")


@pytest.mark.parametrize("error", list(errors()), ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: DockyardError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert (str(copy), copy.args) == (str(error), error.args)
    assert copy.exit_code == error.exit_code
