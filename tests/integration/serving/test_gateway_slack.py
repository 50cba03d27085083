"""`dockyard.slack_ms` over HTTP: who has time lets others go first, and loses nothing by it."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import PATIENCE_S, Stack, serving

LONG: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200,
    "dockyard": {"forced_text": "x" * 200},
}  # fmt: skip


def post(stack: Stack, name: str, slack_ms: float | None, done: list[str]) -> threading.Thread:
    """In a thread of its own; its name is noted when it has ended."""
    asked = {"forced_text": name * 3} | ({} if slack_ms is None else {"slack_ms": slack_ms})
    body = {**LONG, "dockyard": asked}

    def run() -> None:
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        done.append(answer["choices"][0]["message"]["content"][0])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("slack_ms", "order"), [(None, "AB"), (0, "AB"), (60_000, "BA")])
def test_who_has_slack_lets_a_later_one_go_first(
    tiny_model: Path, tmp_path: Path, cpu_library: Path, slack_ms: float | None, order: str
) -> None:
    done: list[str] = []
    with serving(tiny_model, tmp_path, max_sequences=1, starvation_s=600.0) as stack:
        (worker,) = stack.workers
        worker.set_pace(20)
        threads = [threading.Thread(target=lambda: httpx.post(
            f"{stack.url}/v1/chat/completions", json=LONG, timeout=PATIENCE_S
        ))]  # fmt: skip
        threads[0].start()
        stack.wait_until_running(1)
        for count, (name, slack) in enumerate((("A", slack_ms), ("B", None)), 2):
            threads.append(post(stack, name, slack, done))
            stack.wait_until_running(count)
        worker.set_pace(1)
        for thread in threads:
            thread.join(PATIENCE_S)
        stack.wait_until_idle()
    assert "".join(done) == order
