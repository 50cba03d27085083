"""Drafts that have learnt a text hold on it, as served: from training's weights to accepted lengths."""

import torch
from dspark_models import COMPRESSED_IDS, config_of, text

from engine.model.deepseek.config import Quantisation
from engine.model.deepseek.dspark import DraftModel
from engine.model.deepseek.dspark_acceptance import accepted_lengths
from engine.model.deepseek.model import DeepseekModel
from engine.model.tensor_source import TensorsInMemory
from engine.training.batches import BatchMaker
from engine.training.draft import Anchors, DraftPass, draft_loss, initial_drafts
from engine.training.network import Mode, Network
from engine.training.parameters import initial_parameters, released_tensors
from engine.training.sublayers import Rounding
from kernels.operations import select_operations

CONFIG, IDS = config_of(Quantisation.off()), text(64)


def first_drafts_that_hold(parameters) -> float:
    """Share of anchors whose first draft is the model's own."""
    source = TensorsInMemory(dict(released_tensors(parameters)), "training")
    model = DeepseekModel(CONFIG, source, select_operations(1), COMPRESSED_IDS)
    lengths = accepted_lengths(model, DraftModel(model, source), IDS[:59], first=4, stride=5)
    return float((lengths > 0).float().mean())


def test_drafts_that_have_learnt_a_text_hold_on_it(cpu_library):
    backbone, drafts = initial_parameters(CONFIG, 0), initial_drafts(CONFIG, 1)
    network = Network.of(CONFIG, len(IDS))
    with torch.no_grad():
        batch = BatchMaker.of(CONFIG, COMPRESSED_IDS)(torch.tensor([IDS]).numpy().astype("uint16"))
        hidden, seen = network.forward(backbone, batch, Mode(sparse=True))
        wanted_TV = 20 * (hidden[0] @ backbone["head.weight"].T)
    before = first_drafts_that_hold(backbone | drafts)
    learning = [
        t.requires_grad_() for n, t in drafts.items() if not n.endswith(("gate.bias", "gate.bias_vl"))
    ]
    optimiser = torch.optim.Adam(learning, lr=1e-2)
    places = torch.arange(4, 59, 5)
    deciding = places[:, None] + torch.arange(CONFIG.dspark_block_size)
    ids = torch.tensor(IDS)
    anchors = Anchors(places[None], ids[places][None], ids[deciding][None])
    for _ in range(120):
        one = DraftPass(network, backbone | drafts, Rounding(), seen.streams)
        loss = draft_loss(one.run(anchors), wanted_TV[deciding][None], one.balance)
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
    learnt = {name: tensor.detach() for name, tensor in drafts.items()}
    after = first_drafts_that_hold(backbone | learnt)
    assert before < 0.3
    assert after > 0.8
    assert abs(after - loss.accepted[0]) < 0.1
