"""The pass that is trained is the pass that is served."""

import numpy as np
import pytest
import torch
from tiny_nano import COMPRESSED_IDS, repeating_tokens, stirred_parameters, tiny_config, tiny_task

from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.model import DeepseekModel
from engine.model.tensor_source import TensorsInMemory
from engine.training.losses import loss_of
from engine.training.network import Mode
from engine.training.parameters import released_tensors
from engine.training.sublayers import Rounding, balance_loss, sequence_loads
from kernels.torch_operations import TorchOperations


@pytest.mark.parametrize("quantised", [False, True], ids=["float32 caches", "released caches"])
def test_training_and_serving_compute_the_same_logits(quantised: bool):
    config = tiny_config(Quantisation() if quantised else Quantisation.off())
    task, parameters = tiny_task(config), stirred_parameters(config)
    ids = repeating_tokens(64, seed=5)
    rounding = Rounding(task.rounding.window, task.rounding.main, task.rounding.index)
    with torch.no_grad():
        hidden, _ = task.network.forward(parameters, task.batches(ids[None]), Mode(rounding, sparse=True))
        trained = hidden[0] @ parameters["head.weight"].T
    source = TensorsInMemory(dict(released_tensors(parameters)), "training")
    model = DeepseekModel(config, source, TorchOperations(), COMPRESSED_IDS)
    source.check_all_taken()
    served = model.logits(ids.tolist())
    model.close()
    far = (trained - served).abs().amax(-1) > 1e-3
    # A value on a rounding's threshold may fall on either side; without rounding nothing may differ.
    assert int(far.sum()) <= (6 if quantised else 0), (trained - served).abs().amax(-1)


def test_a_stack_holds_each_released_expert_in_its_place():
    config = tiny_config()
    parameters = stirred_parameters(config)
    released = dict(released_tensors(parameters))
    for layer in range(config.num_hidden_layers):
        for expert in range(config.n_routed_experts):
            for matrix in ("w1", "w2", "w3"):
                stack = parameters[f"layers.{layer}.ffn.experts.{matrix}"]
                each = released[f"layers.{layer}.ffn.experts.{expert}.{matrix}.weight"]
                assert torch.equal(stack[expert], each)
    assert {name for name in parameters if ".ffn.experts." not in name} <= released.keys()


@pytest.mark.parametrize("late", [False, True], ids=["dense", "last part"])
def test_every_weight_learns(late: bool):
    config = tiny_config()
    task, parameters = tiny_task(config), stirred_parameters(config)
    for name, tensor in parameters.items():
        tensor.requires_grad_(not name.endswith(("gate.bias", "gate.bias_vl")))
    ids = repeating_tokens(4 * 65).reshape(4, 65)
    batch = task.batches(ids[:, :-1], np.random.default_rng(0) if late else None)
    mode = Mode(task.rounding if late else Rounding(), sparse=late, learn_index=True)
    loss = loss_of(task.network, parameters, batch, torch.tensor(ids[:, 1:], dtype=torch.int64), mode)
    loss.total.backward()
    idle = [
        name
        for name, tensor in parameters.items()
        if tensor.requires_grad and (tensor.grad is None or not tensor.grad.abs().sum() > 0)
    ]
    assert idle == []
    assert all(torch.isfinite(t.grad).all() for t in parameters.values() if t.grad is not None)


def test_experts_balance_sequence_by_sequence():
    """Two sequences that each prefer other experts are balanced in sum, and not each by itself."""
    scores = torch.tensor([[3.0, 1.0]] * 4 + [[1.0, 3.0]] * 4)
    experts = scores.topk(1, -1).indices
    loads = sequence_loads(experts, 2, 2)
    assert loads.tolist() == [[4.0, 0.0], [0.0, 4.0]]
    assert float(balance_loss(scores, loads)) == pytest.approx(2 * 0.75)
    together = sequence_loads(experts, 2, 1)
    assert float(balance_loss(scores, together)) == pytest.approx(1.0)


def test_a_pass_balances_the_sequences_of_its_batch():
    """The same for two sequences in one pass as on average for each alone."""
    config = tiny_config()
    task, parameters = tiny_task(config), stirred_parameters(config)
    ids = np.stack([repeating_tokens(64, seed) for seed in (1, 2)])
    with torch.no_grad():
        both, *each = (
            torch.stack(task.network.forward(parameters, task.batches(rows), Mode())[1].balance.losses)
            for rows in (ids, ids[:1], ids[1:])
        )
    assert torch.allclose(both, torch.stack(each).mean(0), atol=1e-5)


def test_the_indexer_teaches_nothing_but_itself():
    config = tiny_config()
    task, parameters = tiny_task(config), stirred_parameters(config)
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    ids = repeating_tokens(64)[None]
    _, found = task.network.forward(parameters, task.batches(ids), Mode(learn_index=True))
    torch.stack(found.index_losses).sum().backward()
    taught = {name for name, tensor in parameters.items() if tensor.grad is not None and tensor.grad.any()}
    assert taught
    assert all(".indexer." in name for name in taught)
