"""`python -m evals.record_bug TASK --url URL`: writes the digests of a real run into a task's recording.

For authors of recordings: write the answers by hand, run this against a live gateway, and commit the file.
The tools run in real sandboxes; only the digests of what they print are kept.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from evals import team_bugs
from evals.team_sandboxes import BoxConfig, Boxes
from protocol.errors import DockyardError
from protocol.ids import new_id
from sandbox.places import default_home
from teams.model_client import http_models


@dataclass(frozen=True, slots=True)
class _Order:
    task: str
    url: str
    model: str
    recording: Path | None
    cache: Path


def main() -> int:
    """Command line. Exit code 0 when the task was solved and recorded."""
    order = _read_order()
    try:
        return asyncio.run(_record(order))
    except DockyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _read_order() -> _Order:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="a shipped bug task, or a task folder")
    parser.add_argument("--url", required=True, help="the gateway, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2", help="the model that the gateway serves")
    parser.add_argument("--recording", type=Path, help="the file; default: the one that ships with the task")
    cache = default_home() / "cache"
    parser.add_argument(
        "--cache", type=Path, default=cache, help="where sources are kept (default: %(default)s)"
    )
    given = parser.parse_args()
    return _Order(given.task, given.url, given.model, given.recording, given.cache)


async def _record(order: _Order) -> int:
    boxes = Boxes(BoxConfig())
    task = await team_bugs.open_task(order.task, order.cache, boxes)
    models = http_models(order.url, model=order.model, run_id=new_id("run"))
    outcome = await team_bugs.record(task, models=models, sandboxes=boxes, recording=order.recording)
    verdict = outcome.result.verdict
    detail = verdict.detail if verdict else "unverified"
    print(f"{task.name}: {len(outcome.result.transcript)} turns recorded, {detail}")
    return 0 if outcome.result.solved else 1


if __name__ == "__main__":
    sys.exit(main())
