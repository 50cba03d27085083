"""Training learns, stops, and goes on as if it had never stopped."""

from pathlib import Path

import pytest
import torch
from tiny_nano import repeating_tokens, tiny_config, tiny_task

from engine.training.parameters import initial_parameters
from engine.training.trainer import Plan, Trainer

TOKENS = repeating_tokens(3_000)
PLAN = Plan(tokens=1_536, batch_tokens=128, length=32, long_length=64, last_part=0.34, warm_up=0.2)


def trainer() -> Trainer:
    config = tiny_config()
    return Trainer(tiny_task(config), initial_parameters(config, 1), PLAN)


def train(one: Trainer, num_steps: int | None = None) -> list[float]:
    """Nats of each step."""
    nats: list[float] = []
    one.run(TOKENS, lambda: len(nats) == num_steps, lambda _, loss: nats.append(loss.nats))
    return nats


def test_it_learns_and_its_last_part_is_the_released_form():
    one = trainer()
    nats = train(one)
    assert one.progress.seen >= PLAN.tokens
    assert one.progress.length == PLAN.long_length
    assert sum(nats[-3:]) / 3 < nats[0] - 0.5


@pytest.mark.parametrize("stop_after", [3, 10], ids=["in the first part", "in the last"])
def test_a_resumed_training_ends_in_the_same_bits(tmp_path: Path, stop_after: int):
    straight = trainer()
    nats = train(straight)
    first = trainer()
    before = train(first, stop_after)
    first.save(tmp_path)
    second = trainer()
    assert second.resume(tmp_path)
    assert before + train(second) == nats
    for name, tensor in straight.parameters.items():
        assert torch.equal(tensor, second.parameters[name]), name


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path):
    assert not trainer().resume(tmp_path)


def test_rates_warm_up_and_fall():
    rates = [PLAN.rates(seen).muon for seen in range(0, PLAN.tokens + 1, PLAN.tokens // 16)]
    assert rates[0] < rates[4] == pytest.approx(PLAN.muon_rate)
    assert rates[-1] < 0.05 * PLAN.muon_rate
