"""The route that slows a worker: what it passes on, what it refuses, and to whom it answers."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from engine.errors import InvalidRequest
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.service import ChatService
from gateway.worker_pace import is_this_host, parse_pace
from protocol.errors import InvalidInput

JSON = {"content-type": "application/json"}


class Workers:
    """Takes paces for `prefill` and `decode`, as a deployment does."""

    def __init__(self) -> None:
        self.paces: dict[str, float] = {}

    async def set_pace(self, role: str, factor: float) -> None:
        if role not in ("prefill", "decode"):
            raise InvalidInput(f"no worker {role!r}", hint="roles: prefill, decode")
        self.paces[role] = factor


async def no_counts() -> list[Any]:
    return []


async def no_status() -> dict[str, Any]:
    return {}


def post(
    workers: Workers,
    role: str,
    body: bytes,
    client: tuple[str, int] = ("127.0.0.1", 1),
    headers: Mapping[str, str] = JSON,
) -> httpx.Response:
    service = SimpleNamespace(
        model=SimpleNamespace(name="tiny"), config=GatewayConfig(), client=None, ending=asyncio.Event()
    )
    app = create_app(cast(ChatService, service), no_status, no_counts, workers.set_pace)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(f"/dockyard/workers/{role}/pace", content=body, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("factor", [1.0, 2.0, 100.0])
def test_a_pace_reaches_the_worker_of_that_role(factor: float):
    workers = Workers()
    reply = post(workers, "decode", b'{"factor": %g}' % factor)
    assert (reply.status_code, reply.json()) == (200, {"role": "decode", "factor": factor})
    assert workers.paces == {"decode": factor}


@pytest.mark.parametrize(
    "body", [b'{"factor": 0.5}', b'{"factor": 100.5}', b'{"factor": "2"}', b"{}", b'{"factor": NaN}', b"slow",
             b'{"factor": 2, "for": 3}']
)  # fmt: skip
def test_a_pace_out_of_bounds_is_refused_and_changes_nothing(body: bytes):
    workers = Workers()
    reply = post(workers, "decode", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "factor"
    assert workers.paces == {}


def test_an_unknown_role_is_not_found_and_the_roles_are_named():
    reply = post(Workers(), "judge", b'{"factor": 2}')
    assert reply.status_code == 404
    assert "judge" in reply.json()["error"]["message"]
    assert "prefill, decode" in reply.json()["error"]["message"]


@pytest.mark.parametrize("address", ["10.1.2.3", "192.0.2.7", "testclient"])
def test_only_this_host_may_set_a_pace(address: str):
    workers = Workers()
    assert post(workers, "decode", b'{"factor": 2}', (address, 1)).status_code == 403
    assert workers.paces == {}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({**JSON, "origin": "http://gateway"}, 403),
        ({**JSON, "origin": "null"}, 403),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
def test_a_web_page_may_not_set_a_pace(headers: dict[str, str], status: int):
    workers = Workers()
    assert post(workers, "decode", b'{"factor": 2}', headers=headers).status_code == status
    assert bool(workers.paces) == (status == 200)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::", False), (None, False)],
)
def test_loopback_is_this_host(address: str | None, expected: bool):
    assert is_this_host(address) is expected


def test_the_field_at_fault_is_named():
    with pytest.raises(InvalidRequest, match="factor"):
        parse_pace(b'{"factor": 0}')
