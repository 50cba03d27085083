"""The whole run against a local endpoint. The endpoint and the executor are doubles: the one answers from a
script, the other runs programs in a plain child process. `test_humaneval_sandbox.py` has real walls."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evals.grading import Execution
from evals.humaneval import run_humaneval, sampling_seed
from evals.humaneval_config import HumanEvalConfig
from evals.problems import load_problems
from evals.store import Store
from protocol.errors import InvalidInput, MissingCapability

PROBLEMS = load_problems(limit=3)
RIGHT = {problem.entry_point: problem.prompt + problem.canonical_solution for problem in PROBLEMS}


class Endpoint:
    """Speaks chat completions. `answer(name, seed)` gives the reply to the problem of that function, or a
    status to fail with; it runs in a thread of the server."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, body = endpoint.reply(request)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def reply(self, request):
        with self.lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        question = request["messages"][0]["content"]
        name = next(name for name in RIGHT if f"def {name}(" in question)
        answer = self.answer(name, request["seed"])
        with self.lock:
            self.in_flight -= 1
        if isinstance(answer, int):
            return answer, json.dumps({"error": {"message": "as the script says"}}).encode()
        message = {"role": "assistant", "content": answer}
        return 200, json.dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": "double",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18},
            }
        ).encode()


@pytest.fixture
def serve():
    started = []

    def start(answer):
        endpoint = Endpoint(answer)
        thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((endpoint, thread))
        return endpoint

    yield start
    for endpoint, thread in started:
        endpoint.server.shutdown()
        thread.join()
        endpoint.server.server_close()


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "runs.db") as opened:
        yield opened


@pytest.fixture
def execute(tmp_path):
    counter = iter(range(1000))

    async def run(files, script):
        folder = tmp_path / f"box-{next(counter)}"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", script, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        stdout, stderr = await child.communicate()
        return Execution(child.returncode, stdout.decode(), stderr.decode(), "exit", 1.0)

    return run


def config_for(endpoint, **changes):
    settings = {"base_url": endpoint.url, "model": "double", "limit": 3, "retry_delay_s": 0}
    return HumanEvalConfig(**{**settings, **changes})


def fenced(name):
    return f"Here it is:\n```python\n{RIGHT[name]}\n```"


def one_of_each(name, seed):
    """The first problem right, the second wrong, the third not answered."""
    first, second, _ = RIGHT
    if name == first:
        return fenced(name)
    return f"```python\ndef {name}(*a):\n    return None\n```" if name == second else "I would rather not."


def test_counts_are_true(serve, store, execute):
    endpoint = serve(one_of_each)
    seen = []
    config = config_for(endpoint, attempts=2)
    result = asyncio.run(run_humaneval(config, store, execute, on_progress=seen.append))

    assert (result.problems, result.attempts, result.passed, result.solved) == (3, 2, 2, 1)
    assert result.pass_at_1 == pytest.approx(1 / 3)
    assert result.pass_at_k == {1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3)}
    assert (result.of_planned.attempts, result.of_scored.attempts) == (6, 6)
    assert result.verdicts == {"passed": 2, "failed": 2, "no_code": 2}
    assert [row.verdicts for row in result.rows] == [("passed",) * 2, ("failed",) * 2, ("no_code",) * 2]
    assert [progress.done for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].passed == 2

    (run,) = store.runs()
    assert (run.id, run.status) == (result.run_id, "finished")
    trial = store.trials(run.id)[0]
    (turn,) = store.turns(trial.id)
    assert (turn.prompt_tokens, turn.completion_tokens) == (7, 11)
    assert turn.timings_ms["model.decode"] > 0
    assert "def has_close_elements" in trial.program


def test_each_attempt_has_its_own_seed_whatever_else_is_run(serve, store, execute):
    endpoint = serve(one_of_each)
    asyncio.run(run_humaneval(config_for(endpoint, attempts=2), store, execute))
    asyncio.run(run_humaneval(config_for(endpoint, task_ids=("HumanEval/1",)), store, execute))
    seeds = [request["seed"] for request in endpoint.requests]
    assert len(set(seeds[:6])) == 6
    assert seeds[6] == sampling_seed(0, "HumanEval/1", 0)
    assert seeds[6] in seeds[:6]
    assert {(request["temperature"], request["max_tokens"]) for request in endpoint.requests} == {(0.2, 512)}


def test_a_failing_endpoint_is_not_the_models_fault_and_a_resume_mends_it(serve, store, execute):
    broken = sampling_seed(0, PROBLEMS[1].task_id, 1)
    failing = serve(lambda name, seed: 503 if seed == broken else fenced(name))
    config = config_for(failing, attempts=2, infrastructure_retries=1)
    result = asyncio.run(run_humaneval(config, store, execute))
    assert Counter(request["seed"] for request in failing.requests)[broken] == 2  # one retry
    assert result.verdicts == {"passed": 5, "infrastructure": 1}
    assert result.of_planned.pass_at[1] == pytest.approx(5 / 6)
    assert result.of_scored.pass_at[1] == 1.0
    assert result.of_scored.problems_at == {1: 3, 2: 2}
    assert "503" in result.rows[1].details[1]

    mended = serve(lambda name, seed: fenced(name))
    config = config_for(mended, attempts=2)
    result = asyncio.run(run_humaneval(config, store, execute, run_id=result.run_id))
    assert [request["seed"] for request in mended.requests] == [broken]  # only what was missing
    assert result.verdicts == {"passed": 6}


@pytest.mark.parametrize("status", [400, 404, 422])
def test_what_the_endpoint_refuses_is_named_and_not_asked_again(status, serve, store, execute):
    endpoint = serve(lambda name, seed: status)
    config = config_for(endpoint, temperature=5.0, infrastructure_retries=3)
    result = asyncio.run(run_humaneval(config, store, execute))
    assert result.verdicts == {"refused": 3}
    assert len(endpoint.requests) == 3
    assert "as the script says" in result.rows[0].details[0]
    assert (result.pass_at_1, result.of_scored.pass_at[1]) == (0.0, None)
    asyncio.run(run_humaneval(config, store, execute, run_id=result.run_id))
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("status", [408, 429, 500])
def test_what_speaks_of_the_moment_is_tried_again(status, serve, store, execute):
    endpoint = serve(lambda name, seed: status)
    config = config_for(endpoint, limit=1, infrastructure_retries=1)
    result = asyncio.run(run_humaneval(config, store, execute))
    assert result.verdicts == {"infrastructure": 1}
    assert len(endpoint.requests) == 2


def test_a_failing_sandbox_keeps_the_reply(serve, store, execute):
    endpoint = serve(lambda name, seed: fenced(name))
    outcomes = iter([Execution(None, "", "", "lost", 1.0)] * 2)

    async def flaky(files, script):
        return next(outcomes, None) or await execute(files, script)

    config = config_for(endpoint, limit=1, infrastructure_retries=0)
    result = asyncio.run(run_humaneval(config, store, flaky))
    assert result.verdicts == {"infrastructure": 1}
    config = config_for(endpoint, limit=1, infrastructure_retries=1)
    result = asyncio.run(run_humaneval(config, store, flaky, run_id=result.run_id))
    assert result.verdicts == {"passed": 1}
    assert len(endpoint.requests) == 1  # graded twice more, asked once


def test_what_the_graders_sandboxes_lack_is_on_record(serve, store, execute):
    async def weaker(files, script):
        return replace(await execute(files, script), shortfalls=("apparmor", "guard"))

    result = asyncio.run(run_humaneval(config_for(serve(one_of_each), attempts=2), store, weaker))
    assert store.shortfalls(result.run_id) == ("apparmor", "guard")
    result = asyncio.run(run_humaneval(config_for(serve(one_of_each)), store, execute))
    assert store.shortfalls(result.run_id) == ()


def test_an_endpoint_that_is_not_there(serve, store, execute):
    closed = serve(one_of_each)
    config = config_for(closed, infrastructure_retries=0, base_url="http://127.0.0.1:9/v1")
    result = asyncio.run(run_humaneval(config, store, execute))
    assert result.verdicts == {"infrastructure": 3}
    assert (result.pass_at_1, result.of_scored.pass_at[1]) == (0.0, None)


def test_an_interrupted_run_goes_on(serve, store, execute):
    reached, release = threading.Event(), threading.Event()
    slow = sampling_seed(0, PROBLEMS[2].task_id, 0)

    def answer(name, seed):
        if seed == slow:
            reached.set()
            release.wait(30)
        return fenced(name)

    endpoint = serve(answer)
    config = config_for(endpoint)

    async def interrupted():
        others_done = asyncio.Event()

        def on_progress(progress):
            if progress.done == 2:
                others_done.set()

        task = asyncio.create_task(run_humaneval(config, store, execute, on_progress=on_progress))
        await asyncio.to_thread(reached.wait, 30)
        await others_done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    release.set()
    (run,) = store.runs()
    assert run.status == "interrupted"
    asked = len(endpoint.requests)
    result = asyncio.run(run_humaneval(config, store, execute, run_id=run.id))
    assert result.verdicts == {"passed": 3}
    assert len(endpoint.requests) == asked + 1
    assert store.run(run.id).status == "finished"


def test_requests_at_once_are_bounded(serve, store, execute):
    both = threading.Barrier(2, timeout=30)

    def answer(name, seed):
        both.wait()  # passes only where two requests are under way
        return "no"

    endpoint = serve(answer)
    config = config_for(endpoint, attempts=2, generation_concurrency=2)
    asyncio.run(run_humaneval(config, store, execute))
    assert endpoint.most_in_flight == 2


def test_a_resume_must_ask_the_same(serve, store, execute):
    endpoint = serve(one_of_each)
    run_id = asyncio.run(run_humaneval(config_for(endpoint), store, execute)).run_id
    with pytest.raises(InvalidInput, match=r"temperature: run .* was started with 0\.2, not with 0\.9"):
        asyncio.run(run_humaneval(config_for(endpoint, temperature=0.9), store, execute, run_id=run_id))
    with pytest.raises(InvalidInput, match="no run 'run-x'"):
        asyncio.run(run_humaneval(config_for(endpoint), store, execute, run_id="run-x"))
    team = store.start_run("team", {})
    with pytest.raises(InvalidInput, match="is a run of team"):
        asyncio.run(run_humaneval(config_for(endpoint), store, execute, run_id=team))


def test_a_host_without_sandboxes_stops_the_run_with_its_own_error(serve, store):
    async def incapable(files, script):
        raise MissingCapability("no user namespaces", hint="see doctor")

    endpoint = serve(one_of_each)
    with pytest.raises(MissingCapability, match="no user namespaces"):
        asyncio.run(run_humaneval(config_for(endpoint), store, incapable))
    assert store.runs()[0].status == "interrupted"


def test_the_key_is_not_stored(serve, store, execute, tmp_path):
    endpoint = serve(one_of_each)
    asyncio.run(run_humaneval(config_for(endpoint), store, execute, api_key="key-to-keep"))
    store.close()
    assert all(b"key-to-keep" not in path.read_bytes() for path in tmp_path.glob("runs.db*"))
