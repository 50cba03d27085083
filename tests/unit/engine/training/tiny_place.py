"""A training's folder at its end, of a model that has learnt nothing: for tests of what comes after."""

import json
import sysconfig
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tiny_nano import stirred_parameters, tiny_raw

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.engram_hash import compress_ids, table_primes
from engine.training.checkpoint_effects import PLAN, Checkpoint
from engine.training.corpus import Corpus, SourceFile, standard_library
from engine.training.draft import initial_drafts
from engine.training.packing import pack
from engine.training.release import write_release
from engine.training.trainer import Trainer
from engine.training.vocabulary import encode_texts, learn_vocabulary
from engine.training.workplace import Workplace, open_workplace

_MODULES = ("bisect", "heapq", "textwrap", "keyword", "abc")


def tiny_corpus(folder: Path) -> Corpus:
    """Some modules of the real library, two of them under names that are held out."""
    folder.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    names = (f"m{number}.py" for number in count())
    held_out = list(islice((name for name in names if SourceFile(name, "").is_held_out), 2))
    for module, name in zip(_MODULES, [*held_out, *(f"{m}_.py" for m in _MODULES[2:])], strict=True):
        (folder / name).write_text((library / f"{module}.py").read_text()[:6000])
    return standard_library(folder)


def finished_place(folder: Path, corpus: Corpus) -> Workplace:
    """Checkpoint, the one before the last part, log, and `released/`."""
    fresh_place(folder, corpus)
    log = [{"seen": seen, "nats": 9.0 - seen / 1000} for seen in range(100, 5000, 100)]
    log.insert(20, {"seen": 2000, "held_out_bits_per_byte": 2.5})
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return _with_weights(open_workplace(folder))


def fresh_place(folder: Path, corpus: Corpus) -> None:
    """What a training finds when it begins: vocabulary, tokens and a shape of a tenth."""
    folder.mkdir()
    tokenizer = learn_vocabulary(file.text[:200] for file in corpus.training)
    tokenizer.save(str(folder / "tokenizer.json"))
    raw = tiny_raw()
    text: dict[str, Any] = raw["text_config"]
    text["vocab_size"] = tokenizer.get_vocab_size()
    text["engram_compressed_vocab_size"] = int(compress_ids(tokenizer).max()) + 1
    primes = table_primes(cast(DeepseekConfig, SimpleNamespace(**text)))
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    (folder / "config.json").write_text(json.dumps(raw))
    held_out = encode_texts(tokenizer, [file.text for file in corpus.held_out])
    (folder / "held_out.json").write_text(json.dumps(held_out))
    training = encode_texts(tokenizer, [file.text for file in corpus.training])
    np.save(folder / "tokens.npy", pack(training, 1).tokens)
    part = {"files": 1, "bytes": 2, "tokens": 3}
    about = {"text": "some modules", "digest": corpus.digest, "training": part, "held_out": part}
    (folder / "corpus.json").write_text(json.dumps(about))


def _with_weights(place: Workplace) -> Workplace:
    task = place.task(PLAN)
    trainer = Trainer(task, stirred_parameters(task.network.config), PLAN)
    for before in (False, True):
        trainer.save(Checkpoint(place.folder, before).place)
    weights = {name: tensor.detach() for name, tensor in trainer.parameters.items()}
    write_release(place, weights | initial_drafts(task.network.config, 1), place.folder / "released")
    return place
