"""A trained model leaves in the release's own form, and what is read back is what was trained."""

import json
from pathlib import Path

import pytest
import torch
from tiny_nano import COMPRESSED_IDS, repeating_tokens, stirred_parameters, tiny_config, tiny_raw, tiny_task
from tokenizers import Tokenizer, models

from engine.checkpoint.source import open_checkpoint
from engine.model.deepseek.model import DeepseekModel
from engine.training.draft import initial_drafts
from engine.training.network import Mode
from engine.training.release import write_plain, write_release
from engine.training.workplace import Workplace
from kernels.torch_operations import TorchOperations


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Workplace(tmp_path, tokenizer, tiny_raw(), repeating_tokens(10), (), {})


def test_the_release_computes_what_was_trained_for_it(place: Workplace):
    config = tiny_config()
    task, parameters = tiny_task(config), stirred_parameters(config)
    written = write_release(place, parameters | initial_drafts(config, 1), place.folder / "released")
    stored = json.loads((place.folder / "released" / "config.json").read_text())["quantization_config"]
    assert (stored["expert_dtype"], stored["quant_method"]) == ("fp4", "fp8")
    assert written.num_tensors > len(parameters)
    assert (place.folder / "released" / "tokenizer.json").exists()

    source = open_checkpoint(place.folder / "released")
    model = DeepseekModel(config, source, TorchOperations(), COMPRESSED_IDS)
    ids = repeating_tokens(48, seed=5)
    served = model.logits(ids.tolist())
    model.close()
    with torch.no_grad():
        hidden, _ = task.network.forward(
            parameters, task.batches(ids[None]), Mode(task.rounding, sparse=True)
        )
        trained = hidden[0] @ parameters["head.weight"].T
    # Experts were rounded in training too; dense weights lose up to a sixteenth in FP8.
    error = (torch.softmax(served, -1) - torch.softmax(trained, -1)).abs().sum(-1) / 2
    assert error.median() < 0.1


def test_a_plain_folder_holds_every_weight_as_it_was(place: Workplace):
    config = tiny_config()
    parameters = stirred_parameters(config) | initial_drafts(config, 1)
    write_plain(place, parameters, place.folder / "plain")
    source = open_checkpoint(place.folder / "plain")
    for name in ("embed.weight", "layers.3.attn.wq_a.weight", "mtp.2.markov_head.head.weight"):
        assert torch.equal(source.take(name, tuple(parameters[name].shape)), parameters[name])
    stack = parameters["layers.5.ffn.experts.w2"]
    assert torch.equal(source.take("layers.5.ffn.experts.3.w2.weight", tuple(stack[3].shape)), stack[3])
