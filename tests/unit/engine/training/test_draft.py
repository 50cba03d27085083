"""The drafts: they see what serving will give them, learn, and leave the backbone alone."""

import torch
from tiny_nano import repeating_tokens, stirred_parameters, tiny_config, tiny_task
from torch.nn.functional import one_hot

from engine.training.draft import DraftPass, draft_loss, initial_drafts, spread_anchors
from engine.training.network import Mode
from engine.training.optimiser import Optimiser, Rates
from engine.training.sublayers import Rounding

CONFIG = tiny_config()
IDS = torch.tensor(repeating_tokens(4 * 64, seed=3).reshape(4, 64).astype("int64"))


def backbone():
    task, parameters = tiny_task(CONFIG), stirred_parameters(CONFIG)
    with torch.no_grad():
        batch = task.batches(IDS.numpy().astype("uint16"))
        _, found = task.network.forward(parameters, batch, Mode(sparse=True))
        return task.network, parameters, found.streams


def test_drafts_learn_and_the_backbone_stays():
    network, parameters, streams = backbone()
    sure = 20.0 * one_hot(IDS.roll(-1, 1), CONFIG.vocab_size)  # a backbone that knows the text
    drafts = initial_drafts(CONFIG, 1)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    for tensor in drafts.values():
        tensor.requires_grad_(True)
    optimiser = Optimiser(drafts)
    noise = torch.Generator().manual_seed(0)
    totals: list[float] = []
    for _ in range(40):
        anchors, deciding = spread_anchors(IDS, 8, CONFIG.dspark_block_size, noise)
        one = DraftPass(network, parameters | drafts, Rounding(), streams)
        wanted = sure.gather(1, deciding.flatten(1).unsqueeze(2).expand(-1, -1, sure.shape[-1]))
        loss = draft_loss(one.run(anchors), wanted.view(*deciding.shape, -1), one.balance)
        learning = {n: t for n, t in drafts.items() if not n.endswith(("gate.bias", "gate.bias_vl"))}
        found = torch.autograd.grad(loss.total, list(learning.values()), materialize_grads=True)
        gradients = dict(zip(learning, found, strict=True))
        if not totals:
            assert [name for name, g in gradients.items() if not g.any()] == []
        with torch.no_grad():
            optimiser.step(drafts, gradients, Rates(0.02, 0.01))
        totals.append(float(loss.total.detach()))
    assert sum(totals[-5:]) < 0.8 * sum(totals[:5])
    assert all(torch.equal(before[name], parameters[name]) for name in before)


def test_a_draft_sees_the_window_before_its_anchor_and_its_own_block_alone():
    network, parameters, streams = backbone()
    both = parameters | initial_drafts(CONFIG, 1)
    noise = torch.Generator().manual_seed(0)
    anchors, _ = spread_anchors(IDS, 1, CONFIG.dspark_block_size, noise)
    at = int(anchors.positions[0, 0])
    first = int(max(at - CONFIG.sliding_window, 0))

    def logits(changed: slice) -> torch.Tensor:
        moved = {layer: stream.clone().view(4, 64, -1) for layer, stream in streams.items()}
        for stream in moved.values():
            stream[0, changed] += 1.0
        flat = {layer: stream.flatten(0, 1) for layer, stream in moved.items()}
        return DraftPass(network, both, Rounding(), flat).run(anchors).logits[0, 0]

    plain = logits(slice(0, 0))
    assert torch.equal(plain, logits(slice(at, 64)))  # not yet verified
    assert torch.equal(plain, logits(slice(0, first)))  # out of the window
    for position in (first, at - 1):
        assert not torch.equal(plain, logits(slice(position, position + 1)))
