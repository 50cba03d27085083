"""Links in stock: each claimed once, made again behind the claimer's back, none left at the end."""

import threading
from collections.abc import Callable
from itertools import count

import pytest

from sandbox.egress.links import Link
from sandbox.egress.trunk import Home
from sandbox.errors import CapacityError
from sandbox.pool import Pool


def a_maker() -> tuple[Callable[[], Link], list[Link]]:
    numbers, made = count(1), list[Link]()

    def make() -> Link:
        number = next(numbers)
        made.append(Link(f"dky{number}", number, -1, Home(number)))
        return made[-1]

    return make, made


def test_each_is_claimed_once_and_the_rest_removed():
    make, made = a_maker()
    removed: list[Link] = []
    pool = Pool(make, removed.append, 3)
    pool.wait()
    assert pool.num_ready() == 3
    claimed = [pool.claim() for _ in range(5)]
    pool.wait()
    assert len({id(link) for link in claimed}) == 5
    pool.close()
    assert pool.num_ready() == 0
    assert {id(link) for link in claimed + removed} == {id(link) for link in made}
    pool.close()


def test_nothing_is_made_ahead_where_none_is_kept():
    make, made = a_maker()
    pool = Pool(make, lambda link: None, 0)
    pool.wait()
    assert made == []
    assert pool.claim() is made[0]
    pool.close()


def test_what_cannot_be_made_ahead_is_the_claimers_error():
    def fail() -> Link:
        raise CapacityError("no free address")

    pool = Pool(fail, lambda link: None, 2)
    pool.wait()
    with pytest.raises(CapacityError, match="no free address"):
        pool.claim()
    pool.close()


def test_many_threads_claim_different_ones():
    make, _ = a_maker()
    pool = Pool(make, lambda link: None, 4)
    claimed: list[Link] = []
    threads = [threading.Thread(target=lambda: claimed.append(pool.claim())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert len({id(link) for link in claimed}) == 16


@pytest.mark.parametrize("error", [MemoryError(), LookupError()])
def test_more_is_made_ahead_after_whatever_ended_that(monkeypatch: pytest.MonkeyPatch, error: Exception):
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    make, _ = a_maker()
    errors = [error]

    def fail_once() -> Link:
        if errors:
            raise errors.pop()
        return make()

    pool = Pool(fail_once, lambda link: None, 2)
    pool.wait()
    pool.wait()
    assert pool.num_ready() == 2
    assert seen == ([LookupError] if isinstance(error, LookupError) else [])
    pool.close()
