"""The optimiser: orthogonal steps for matrices, Adam's for the rest, all state in plain tensors."""

import pytest
import torch

from engine.training.optimiser import Optimiser, Rates, orthogonalised, takes_muon


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 64, 16), (5, 16, 64)])
def test_steps_are_nearly_orthogonal(shape):
    noise = torch.Generator().manual_seed(1)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=noise)))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_a_stack_steps_as_its_matrices_do_alone():
    noise = torch.Generator().manual_seed(2)
    stack = torch.randn(4, 8, 24, generator=noise)
    alone = torch.stack([orthogonalised(each.unsqueeze(0))[0] for each in stack])
    assert torch.allclose(orthogonalised(stack), alone, atol=1e-5)


def test_tables_routers_and_vectors_are_adams():
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    assert takes_muon("layers.0.attn.wq_a.weight", matrix)
    assert takes_muon("layers.0.ffn.experts.w1", torch.zeros(2, 4, 4))
    for name in ("embed.weight", "head.weight", "layers.1.engram.embed.weight", "layers.0.ffn.gate.weight",
                 "layers.0.hc_attn_fn", "layers.1.engram.q_weight", "mtp.0.ffn.gate.weight"):  # fmt: skip
        assert not takes_muon(name, matrix)
    assert takes_muon("layers.2.attn.compressor.wgate.weight", matrix)  # a projection, no router
    assert not takes_muon("norm.weight", vector)


def test_weights_decay_and_norms_do_not():
    """By the rate and the decay, apart from the step: AdamW (Loshchilov and Hutter 2019)."""
    names = ("embed.weight", "layers.0.attn.wkv.weight", "layers.1.engram.q_weight", "norm.weight")
    parameters = {name: torch.ones(4, 4) if name != "norm.weight" else torch.ones(4) for name in names}
    gradients = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    Optimiser(parameters, weight_decay=0.1).step(parameters, gradients, Rates(0.5, 0.25))
    assert [float(parameters[name].flatten()[0]) for name in names] == pytest.approx([0.975, 0.95, 1.0, 1.0])


def test_adams_first_step_is_the_rate_whenever_it_comes():
    """Averages count a parameter's own steps, and one without a gradient keeps them."""
    parameters = {"norm.weight": torch.zeros(2), "layers.2.attn.indexer.k_norm.weight": torch.zeros(2)}
    first, second = parameters
    optimiser = Optimiser(parameters)
    ones = {name: torch.ones(2) for name in parameters}
    for _ in range(3):
        optimiser.step(parameters, {first: ones[first]}, Rates(0.1, 0.1))
    assert parameters[second].tolist() == [0.0, 0.0]
    optimiser.step(parameters, ones, Rates(0.1, 0.1))
    assert parameters[second].tolist() == pytest.approx([-0.1, -0.1])


def test_momentum_rests_with_its_matrix():
    name = "layers.2.attn.indexer.wk.weight"
    parameters = {name: torch.eye(4)}
    optimiser = Optimiser(parameters)
    optimiser.step(parameters, {name: torch.eye(4)}, Rates(0.1, 0.1))
    kept, momentum = parameters[name].clone(), optimiser.state[f"{name}#momentum"].clone()
    optimiser.step(parameters, {}, Rates(0.1, 0.1))
    assert torch.equal(parameters[name], kept)
    assert torch.equal(optimiser.state[f"{name}#momentum"], momentum)


def test_it_finds_a_minimum():
    noise = torch.Generator().manual_seed(3)
    wanted = torch.randn(16, 16, generator=noise)
    parameters = {"layers.0.attn.wkv.weight": torch.zeros(16, 16), "norm.weight": torch.zeros(16)}
    optimiser = Optimiser(parameters, weight_decay=0.0)
    for step in range(300):
        gradients = {
            "layers.0.attn.wkv.weight": parameters["layers.0.attn.wkv.weight"] - wanted,
            "norm.weight": parameters["norm.weight"] - wanted[0],
        }
        rate = 0.1 * (1 - step / 300)
        optimiser.step(parameters, gradients, Rates(rate, rate))
    assert (parameters["norm.weight"] - wanted[0]).abs().max() < 0.05
    assert (parameters["layers.0.attn.wkv.weight"] - wanted).abs().mean() < 0.1


def test_a_parameter_without_a_gradient_stays():
    parameters = {"norm.weight": torch.ones(4), "layers.0.attn.wkv.weight": torch.ones(4, 4)}
    Optimiser(parameters).step(parameters, {}, Rates(0.1, 0.1))
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in parameters.values())
