"""A process that serves prompts until it is killed: a line on stdout for each token."""

import json
import sys
from pathlib import Path

from bench.equivalence_cells.subject import GREEDY
from engine import Engine, EngineConfig, Request


def main(path: str) -> None:
    given = json.loads(Path(path).read_text())
    config = EngineConfig(
        model=given["model"], replay=given["replay"], kv_cache_bytes=given["kv_cache_bytes"], threads=1,
        token_budget=2048, max_sequences=len(given["cases"]),
    )  # fmt: skip
    engine = Engine(config)
    for name, prompt_ids in given["cases"]:
        engine.add(Request(name, tuple(prompt_ids), GREEDY, cache_salt=name))
    while engine.has_work:
        for output in engine.step().tokens:
            logprob = output.logprobs.logprob if output.logprobs else 0.0
            sys.stdout.write(json.dumps([output.request_id, output.token_ids[0], logprob]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
