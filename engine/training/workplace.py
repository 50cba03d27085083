"""The folder that a training works in: text, vocabulary and tokens are made once, then found again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import compress_ids, table_primes
from engine.training.batches import BatchMaker
from engine.training.corpus import Corpus, num_bytes, standard_library
from engine.training.network import Network
from engine.training.packing import Ids, pack
from engine.training.rounding import released_rounding
from engine.training.shape import nano_config
from engine.training.trainer import Plan, Task
from engine.training.vocabulary import encode_texts, learn_vocabulary
from protocol.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Workplace:
    """`raw` is config.json; `held_out` are token ids by file."""

    folder: Path
    tokenizer: Tokenizer
    raw: dict[str, Any]
    tokens: Ids
    held_out: tuple[tuple[int, ...], ...]
    about: dict[str, Any]  # of the text: digest, files, bytes

    def task(self, plan: Plan) -> Task:
        config = DeepseekConfig.from_dict(self.raw)
        batches = BatchMaker.of(config, compress_ids(self.tokenizer))
        return Task(Network.of(config, plan.long_length), batches, released_rounding(config))


def open_workplace(folder: Path) -> Workplace:
    """Makes what is missing: about two minutes of one core the first time.

    Raises InvalidInput where the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "corpus.json").exists():
            _make(folder, standard_library())
    except OSError as error:
        raise InvalidInput(
            f"work folder {folder}: {error.strerror or error}", hint="name a folder that can be written"
        ) from error
    about = json.loads((folder / "corpus.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files: list[list[int]] = json.loads((folder / "held_out.json").read_text())
    held_out = tuple(tuple(file) for file in files)
    raw = json.loads((folder / "config.json").read_text())
    return Workplace(folder, tokenizer, raw, np.load(folder / "tokens.npy"), held_out, about)


def _make(folder: Path, corpus: Corpus) -> None:
    """corpus.json comes last: where it is, the rest is whole."""
    tokenizer = learn_vocabulary(file.text for file in corpus.training)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(_config(tokenizer), indent=2) + "\n")
    training = encode_texts(tokenizer, [file.text for file in corpus.training])
    held_out = encode_texts(tokenizer, [file.text for file in corpus.held_out])
    np.save(folder / "tokens.npy", pack(training, 1).tokens)
    (folder / "held_out.json").write_text(json.dumps(held_out))
    (folder / "corpus.json").write_text(json.dumps(_about(corpus, training, held_out), indent=2) + "\n")


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The sizes of Engram's tables follow from the rest."""
    compressed = int(compress_ids(tokenizer).max()) + 1
    draft = cast(DeepseekConfig, SimpleNamespace(**nano_config(tokenizer, compressed, [])["text_config"]))
    rows = [sum(map(sum, layer)) for layer in table_primes(draft)]
    return nano_config(tokenizer, compressed, rows)


def _about(
    corpus: Corpus, training: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> dict[str, Any]:
    parts = {"training": (corpus.training, training), "held_out": (corpus.held_out, held_out)}
    counts = {
        name: {"files": len(files), "bytes": num_bytes(files), "tokens": sum(map(len, tokens))}
        for name, (files, tokens) in parts.items()
    }
    return {"text": "the standard library of CPython", "digest": corpus.digest, **counts}
