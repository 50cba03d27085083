"""llama.cpp on the same file: the independent implementation that ours is measured and checked against."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import xllamacpp


@dataclass(frozen=True, slots=True)
class Completion:
    """What it generated, and how long each stage took by its own clock, without HTTP."""

    token_ids: tuple[int, ...]
    prompt_s: float
    decode_s: float  # of all tokens after the prompt


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Its HTTP server, the part of it that takes and gives token ids. Calls block; any thread."""

    client: httpx.Client

    def greedy(self, prompt_ids: Sequence[int], count: int, *, ignore_eos: bool = False) -> Completion:
        """Its most likely tokens, up to `count`; fewer where the text ends. Nothing comes from its cache."""
        asked = {
            "prompt": list(prompt_ids), "n_predict": count, "temperature": 0, "return_tokens": True,
            "cache_prompt": False, "ignore_eos": ignore_eos,
        }  # fmt: skip
        answer = self._post("/completion", asked)
        times = answer["timings"]
        return Completion(tuple(answer["tokens"]), times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3)

    def next_token(self, prompt_ids: Sequence[int]) -> int:
        """Its most likely next token. What it has kept of a prompt that begins the same is used again."""
        asked = {
            "prompt": list(prompt_ids), "n_predict": 1, "temperature": 0, "return_tokens": True,
            "cache_prompt": True, "ignore_eos": False,
        }  # fmt: skip
        return self._post("/completion", asked)["tokens"][0]

    def tokenize(self, text: str) -> list[int]:
        asked = {"content": text, "add_special": False, "parse_special": True}
        return self._post("/tokenize", asked)["tokens"]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._post("/detokenize", {"tokens": list(token_ids)})["content"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.client.post(path, json=body).raise_for_status().json()


@contextmanager
def llama_cpp(model: Path, *, threads: int, parallel: int = 1, positions: int = 1024) -> Generator[LlamaCpp]:
    """A server in this process, on a free loopback port, for the length of the block.

    `parallel` requests run at once, each with `positions` positions. Blocks until the model is loaded.
    """
    settings = cast(Any, xllamacpp).CommonParams()
    settings.model.path = str(model)
    settings.n_parallel, settings.n_ctx, settings.n_gpu_layers = parallel, positions * parallel, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.warmup, settings.verbosity = False, 0
    server = cast(Any, xllamacpp).Server(settings)
    with httpx.Client(base_url=server.listening_address, timeout=300) as client:
        yield LlamaCpp(client)
    del server  # ends its threads
