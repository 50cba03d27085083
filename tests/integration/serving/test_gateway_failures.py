"""Clients hang up, queues are full, workers die: every request ends, and nothing stays behind."""

import pickle
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_runs import finish, small_engine
from msgspec.structs import replace
from ray.exceptions import RayTaskError
from stack import PATIENCE_S, Stack, serving
from tiny_gguf import byte_ids

from actors.engine_actor import raised_by_worker
from actors.engine_worker import EngineWorker, WorkerFailed
from actors.token_server import TokenServer
from engine import EngineConfig, Request, SamplingParams
from engine.errors import ContextExceeded, InvalidRequest, Overloaded
from engine.handoff import Handoff
from gateway.config import GatewayConfig
from protocol.errors import ResourceShortage
from protocol.sampling import Structure
from protocol.wire import Abort, Failed

# 400 tokens at a twentieth of the speed: seconds, of which the tests need a few steps.
LONG: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400,
    "dockyard": {"forced_text": "x" * 400},
}  # fmt: skip
SHORT: dict[str, Any] = {**LONG, "dockyard": {"forced_text": "xyz"}}
Make = Callable[..., AbstractContextManager[Stack]]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> Make:
    return lambda **settings: serving(tiny_model, tmp_path, **settings)


@pytest.fixture(params=[False, True], ids=["one worker", "prefill and decode"])
def slow(request: pytest.FixtureRequest, make: Make) -> Iterator[Stack]:
    with make(disaggregated=request.param) as stack:
        stack.workers[-1].set_pace(20)
        yield stack


def url(stack: Stack) -> str:
    return f"{stack.url}/v1/chat/completions"


def stream_lines(stack: Stack, body: dict[str, Any]) -> Generator[str]:
    with httpx.stream("POST", url(stack), json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        yield from answer.iter_lines()


class Background:
    """A request in a thread of its own."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        self.answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(self._post(stack, body)))
        self._thread.start()

    def _post(self, stack: Stack, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(url(stack), json=body, timeout=PATIENCE_S)

    def result(self) -> httpx.Response:
        self._thread.join(PATIENCE_S)
        assert self.answers, "the request did not end"
        return self.answers[0]


# ---------------------------------------------------------------- clients that hang up
def test_a_stream_that_is_dropped_frees_its_request(slow: Stack) -> None:
    lines = stream_lines(slow, LONG)
    assert '"x' in next(line for line in lines if '"content":"x' in line)
    slow.wait_until_running()
    before = num_aborted(slow)
    lines.close()
    slow.wait_until_idle()
    slow.wait_until(lambda: num_aborted(slow) == before + 1, "an abort that is counted")


def num_aborted(stack: Stack) -> float:
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if 'finished_reason="abort"' in line and "_total" in line
    )


def test_a_whole_answer_that_nobody_waits_for_frees_its_request(slow: Stack) -> None:
    before = num_aborted(slow)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url(slow), json={**LONG, "n": 3}, timeout=httpx.Timeout(PATIENCE_S, read=0.5))
    slow.wait_until_idle()
    slow.wait_until(lambda: num_aborted(slow) == before + 3, "aborts that are counted")
    assert httpx.post(url(slow), json=SHORT, timeout=PATIENCE_S).status_code == 200


def test_others_go_on_when_one_hangs_up(slow: Stack) -> None:
    staying = Background(slow, {**LONG, "dockyard": {"forced_text": "stay" * 10}})
    lines = stream_lines(slow, LONG)
    next(line for line in lines if '"content":"x' in line)
    lines.close()
    assert staying.result().json()["choices"][0]["message"]["content"] == "stay" * 10
    slow.wait_until_idle()


def test_a_stop_string_ends_the_request_on_the_workers_too(slow: Stack) -> None:
    body = {**LONG, "stop": "xxx"}
    assert (
        httpx.post(url(slow), json=body, timeout=PATIENCE_S).json()["choices"][0]["message"]["content"] == ""
    )
    slow.wait_until_idle()
    assert slow.workers[-1].engine.statistics().rows < 300


# ---------------------------------------------------------------- full queues
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_429(make: Make, stream: bool) -> None:
    with make(max_waiting=1, max_sequences=1) as stack:
        stack.workers[0].set_pace(20)
        running = Background(stack, LONG)
        stack.wait_until_running(1)
        waiting = Background(stack, SHORT)
        stack.wait_until_running(2)
        refused = httpx.post(url(stack), json={**SHORT, "stream": stream}, timeout=PATIENCE_S)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        with stack.sdk() as sdk, pytest.raises(openai.RateLimitError):
            sdk.chat.completions.create(model="tiny", messages=LONG["messages"], stream=stream)
        stack.workers[0].set_pace(1)
        assert running.result().status_code == waiting.result().status_code == 200
        stack.wait_until_idle()


# ---------------------------------------------------------------- workers that die
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_worker_that_goes_ends_what_runs_and_the_health(slow: Stack, which: int) -> None:
    whole, lines = Background(slow, LONG), stream_lines(slow, LONG)
    next(line for line in lines if '"content":"x' in line)
    slow.workers[which].stop()
    slow.wait_until(lambda: httpx.get(f"{slow.url}/health").status_code == 503, "bad health")
    rest = [line for line in lines if line]
    assert '"error"' in rest[-1]
    assert '"code":"lost"' in rest[-1]
    assert not any('"finish_reason":"' in line or "[DONE]" in line for line in rest)
    assert whole.result().status_code == 503
    for stream in (False, True):
        after = httpx.post(url(slow), json={**SHORT, "stream": stream}, timeout=PATIENCE_S)
        assert (after.status_code, after.json()["error"]["code"]) == (503, "lost")
    survivor = slow.workers[-1 if which == 0 else 0]
    if len(slow.workers) == 2:
        slow.wait_until(lambda: slow.num_queued(survivor) == 0, "an idle survivor")
    # `stop` again, at the end of the stack, has nothing to do: the thread has ended.


def test_an_engine_that_fails_ends_its_requests_and_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as stack:
        (worker,) = stack.workers
        worker.set_pace(20)
        running = Background(stack, LONG)
        stack.wait_until_running()

        def broken() -> None:
            raise ArithmeticError("a seeded fault")

        monkeypatch.setattr(worker.engine, "step", broken)
        answer = running.result()
        assert answer.status_code in (500, 503)
        stack.wait_until(lambda: httpx.get(f"{stack.url}/health").status_code == 503, "bad health")
        with pytest.raises(WorkerFailed, match="ArithmeticError: a seeded fault"):
            worker.call(worker.engine.statistics)
    assert "a seeded fault" in caplog.text


def test_a_prefill_worker_without_a_decode_worker_says_so(make: Make) -> None:
    with make(role="prefill") as stack:
        answer = httpx.post(url(stack), json=LONG, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "lost")
        assert "no decode worker" in answer.json()["error"]["message"]
        stack.wait_until_idle()


def test_a_refused_hand_off_ends_the_request(make: Make) -> None:
    with make(disaggregated=True) as stack:
        decode = stack.workers[1]
        decode.call(lambda: setattr(decode.engine._weights, "fingerprint", "another"))
        answer = httpx.post(url(stack), json=LONG, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "lost")
        assert "'model'" in answer.json()["error"]["message"]
        stack.wait_until_idle()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("32 requests are waiting"), 429, "overloaded"),
        (InvalidRequest("too much for here", parameter="messages"), 400, "invalid"),
        (ContextExceeded("too long for here", parameter="messages"), 400, "context_length_exceeded"),
        (OSError("the object store is full"), 503, "lost"),
        (TypeError("cannot be sent"), 503, "lost"),
    ],
)
def test_a_hand_off_that_fails_ends_its_request_alone(
    make: Make, error: Exception, status: int, code: str
) -> None:
    with make(disaggregated=True) as stack:
        hand_over = stack.workers[0]._hand_over

        def failing(handoff: Handoff) -> None:
            raise error

        stack.workers[0]._hand_over = failing
        answer = httpx.post(url(stack), json=LONG, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert str(error) in answer.json()["error"]["message"]
        stack.workers[0]._hand_over = hand_over
        assert httpx.post(url(stack), json=SHORT, timeout=PATIENCE_S).status_code == 200
        stack.wait_until_idle()


def test_what_a_worker_raised_comes_out_of_rays_error() -> None:
    full = Overloaded("32 requests are waiting", hint="try again later")
    (wrapped,) = pickle.loads(pickle.dumps([RayTaskError("adopt", "a traceback", full)]))
    error = raised_by_worker(wrapped.as_instanceof_cause())
    assert isinstance(error, Overloaded)
    assert str(error) == str(full)
    other = ConnectionError("the process is gone")
    assert raised_by_worker(other) is other


# ---------------------------------------------------------------- hand-offs and their aborts
@pytest.fixture
def decode(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> Iterator[EngineWorker]:
    config = EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20, role="decode")
    worker = EngineWorker(config, tmp_path / "decode.sock")
    worker.start()
    yield worker
    worker.stop()


def handed_over(model: Path) -> Handoff:
    prefill = small_engine(model, role="prefill")
    prefill.add(Request("gw-1/0", tuple(byte_ids(b"hello")), SamplingParams(max_tokens=400, ignore_eos=True)))
    return prefill.step().handoffs[0]


def test_a_hand_off_that_comes_after_its_abort_is_dropped(tiny_model: Path, decode: EngineWorker) -> None:
    decode._inbox.put(Abort("gw-1/0"))
    decode.adopt(handed_over(tiny_model))
    assert not decode.call(lambda: decode.engine.has_work)


def test_a_hand_off_whose_client_has_gone_is_dropped(tiny_model: Path, decode: EngineWorker) -> None:
    decode._server._on_gone("gw-1")
    decode.adopt(handed_over(tiny_model))
    assert not decode.call(lambda: decode.engine.has_work)


def test_a_hand_off_that_is_wanted_runs_to_its_end(tiny_model: Path, decode: EngineWorker) -> None:
    handoff = handed_over(tiny_model)
    decode.adopt(handoff)
    while decode.call(lambda: decode.engine.has_work):
        pass
    expected = finish(
        small_engine(tiny_model), [Request("r", handoff.header.prompt_ids, handoff.header.sampling)]
    )
    assert decode.call(decode.engine.statistics).rows == len(expected["r"]) - 1


class Slow:
    """Compiles when it is told to."""

    def __init__(self, worker: EngineWorker) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        grammars = worker.engine.sampler.grammars
        self._compile, grammars._compile = grammars._compile, self.compile

    def compile(self, structure: Structure) -> Any:
        self.began.set()
        assert self.go.wait(PATIENCE_S), "nobody lets it go on"
        return self._compile(structure)


def handed_over_with(model: Path, *patterns: str) -> list[Handoff]:
    """Requests of a client `gw-1`, each with a grammar."""
    prefill = small_engine(model, role="prefill")
    handoffs: list[Handoff] = []
    for number, pattern in enumerate(patterns):
        sampling = SamplingParams(max_tokens=8, structure=Structure("regex", pattern))
        prefill.add(Request(f"gw-1/{number}", tuple(byte_ids(b"hello")), sampling))
        handoffs += prefill.step().handoffs
    prefill.close()
    return handoffs


def test_hand_offs_that_wait_for_their_grammar_hold_up_no_caller(
    tiny_model: Path, decode: EngineWorker
) -> None:
    handoffs = handed_over_with(tiny_model, *("[ab]+" + "c" * n for n in range(9)))
    slow = Slow(decode)
    for handoff in handoffs:  # one thread: each that waited would be the last
        decode.adopt(handoff)
    assert slow.began.wait(PATIENCE_S)
    decode._inbox.put(Abort("gw-1/3"))
    decode.call(decode.check_integrity)
    slow.go.set()
    while decode.call(lambda: bool(decode._compiling) or decode.engine.has_work):
        pass
    decode.call(decode.check_integrity)
    assert decode.call(decode.engine.statistics).rows > 0
    assert "gw-1/3" not in decode._owned


def test_a_hand_off_that_is_refused_once_its_grammar_is_there_is_told_to_its_client(
    tiny_model: Path, decode: EngineWorker
) -> None:
    told: list[Failed] = []
    decode._server.send = told.extend  # type: ignore[method-assign]
    (broken,) = handed_over_with(tiny_model, "[ab]+")
    decode.adopt(Handoff(replace(broken.header, version=-1), broken.payload))
    while decode.call(lambda: bool(decode._compiling)):
        pass
    ((request_id, message),) = [(failed.request_id, failed.message) for failed in told]
    assert request_id == "gw-1/0"
    assert "version" in message
    decode.call(decode.check_integrity)


def test_a_worker_that_has_stopped_refuses_calls(tiny_model: Path, decode: EngineWorker) -> None:
    handoff = handed_over(tiny_model)
    decode.stop()
    with pytest.raises(WorkerFailed, match="stopped"):
        decode.adopt(handoff)


# ---------------------------------------------------------------- sockets
def test_a_socket_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "s.sock", tmp_path / ("x" * 120)):
        server = TokenServer(path, lambda message: None, lambda client: None)
        with pytest.raises(ResourceShortage, match="socket"):
            server.start()


def test_a_socket_is_gone_after_its_worker(tiny_model: Path, tmp_path: Path, cpu_library: Path) -> None:
    path = tmp_path / "w.sock"
    worker = EngineWorker(EngineConfig(model=str(tiny_model), threads=1, kv_cache_bytes=8 << 20), path)
    worker.start()
    assert path.exists()
    worker.stop()
    worker.stop()
    assert not path.exists()


def half_a_request(url: str) -> socket.socket:
    """A connection that has sent the head of a request and the start of its body."""
    where = httpx.URL(url)
    client = socket.create_connection((where.host, where.port), PATIENCE_S)
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: 1000\r\n\r\n{"
    )
    return client


def everything(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(4096), b""))


def test_a_body_that_does_not_come_is_given_up(make: Make) -> None:
    with make(gateway=GatewayConfig(body_timeout_s=0.2)) as stack, half_a_request(stack.url) as client:
        answer = everything(client)  # the gateway closes: what is left of the body is no request
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"the request\'s body was not whole in its time"' in answer
        assert httpx.post(url(stack), json=SHORT, timeout=PATIENCE_S).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as stack:
        for _ in range(5):
            half_a_request(stack.url).close()
        assert httpx.post(url(stack), json=SHORT, timeout=PATIENCE_S).status_code == 200
    assert caplog.records == []
