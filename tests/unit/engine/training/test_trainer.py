"""Training learns, stops, and goes on as if it had never stopped."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_nano import repeating_tokens, tiny_config, tiny_task

from engine.errors import BrokenModelFile
from engine.training.losses import Loss
from engine.training.parameters import initial_parameters
from engine.training.ranks import Ranks
from engine.training.saved import progress_of
from engine.training.tensor_file import read_tensors, write_tensors
from engine.training.trainer import CHECKPOINT, Plan, Progress, Trainer
from protocol.errors import InvalidInput

TOKENS = repeating_tokens(3_000)
PLAN = Plan(tokens=1_536, batch_tokens=128, length=32, long_length=64, last_part=0.34, warm_up=0.2)


@dataclass(frozen=True)
class Straight:
    trainer: Trainer
    nats: list[float]
    folder: Path

    def progress_behind(self, step: int) -> Progress:
        found = progress_of(self.folder / str(step) / CHECKPOINT)
        assert found is not None
        return Progress(**found)


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


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """A training without a stop, which leaves a checkpoint behind each of its steps."""
    one, nats, folder = trainer(), [], tmp_path_factory.mktemp("steps")

    def log(progress: Progress, loss: Loss) -> None:
        nats.append(loss.nats)
        one.save(folder / str(progress.steps))

    one.run(TOKENS, lambda: False, log)
    return Straight(one, nats, folder)


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_a_resumed_training_ends_in_the_same_bits(straight: Straight, stop_after: int):
    """From behind any step: the first part's, the one that begins the last part, the last part's."""
    resumed = trainer()
    assert resumed.resume(straight.folder / str(stop_after))
    assert train(resumed) == straight.nats[stop_after:]
    for name, tensor in straight.trainer.parameters.items():
        assert torch.equal(tensor, resumed.parameters[name]), name


def test_a_stop_leaves_what_a_checkpoint_on_the_way_has(straight: Straight, tmp_path: Path):
    stopped = trainer()
    assert train(stopped, 8) == straight.nats[:8]
    assert stopped.progress.length == PLAN.long_length  # of the step that comes next
    stopped.save(tmp_path)
    assert replace(stopped.progress, seconds=0.0) == replace(straight.progress_behind(8), seconds=0.0)


def test_all_steps_of_the_plan_are_tried(straight: Straight):
    assert len(straight.nats) == 12


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path):
    assert not trainer().resume(tmp_path)


@pytest.mark.parametrize(
    ("field", "plan", "ranks"),
    [
        ("tokens", replace(PLAN, tokens=2_048), Ranks()),
        ("batch_tokens", replace(PLAN, batch_tokens=256), Ranks()),
        ("last_part", replace(PLAN, last_part=0.5), Ranks()),
        ("ranks", PLAN, Ranks(0, 2)),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused_by_its_field(
    straight: Straight, field: str, plan: Plan, ranks: Ranks
):
    config = tiny_config()
    other = Trainer(tiny_task(config), initial_parameters(config, 1), plan, ranks)
    with pytest.raises(InvalidInput, match=f"begun with {field} [0-9.]+, not"):
        other.resume(straight.folder / "3")


@pytest.mark.parametrize("what", ["lacks", "has no use for"])
def test_a_checkpoint_of_other_tensors_is_refused(straight: Straight, tmp_path: Path, what: str):
    """A tensor that the file lacks would keep its random start."""
    tensors, words = read_tensors(straight.folder / "3" / CHECKPOINT)
    if what == "lacks":
        del tensors["p:layers.0.attn.wkv.weight"]
    else:
        tensors["p:layers.0.attn.wkw.weight"] = torch.zeros(1)
    write_tensors(tmp_path / CHECKPOINT, tensors, words)
    with pytest.raises(BrokenModelFile, match=rf"{what} 1 tensors.*'p:layers.0.attn.wk[vw].weight'"):
        trainer().resume(tmp_path)


@pytest.mark.parametrize(
    ("plan", "tokens", "message"),
    [
        (replace(PLAN, batch_tokens=32), 3_000, "batch_tokens is 32, expected a sequence of 64"),
        (PLAN, 150, "the text has 150 tokens, expected 193"),
    ],
)
def test_a_plan_without_room_for_a_step_is_refused(plan: Plan, tokens: int, message: str):
    config = tiny_config()
    one = Trainer(tiny_task(config), initial_parameters(config, 1), plan)
    with pytest.raises(InvalidInput, match=message):
        one.run(TOKENS[:tokens], lambda: False, lambda _, __: None)


def test_indexers_rest_where_they_learn_nothing():
    """Of four steps in the first part one teaches them. Momentum alone moves nothing in the others."""
    one = trainer()
    found: list[dict[str, torch.Tensor]] = [_indexers(one)]
    one.run(TOKENS, lambda: len(found) == 6, lambda _, __: found.append(_indexers(one)))
    for step, (before, after) in enumerate(pairwise(found)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == (set(before) if step % 4 == 0 else set()), step


def _indexers(one: Trainer) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in one.parameters.items() if ".indexer." in n}


def test_rates_warm_up_and_fall():
    rates = [PLAN.rates(seen).muon for seen in range(0, PLAN.tokens + 1, PLAN.tokens // 16)]
    assert rates[0] < rates[4] == pytest.approx(PLAN.muon_rate)
    assert rates[-1] < 0.05 * PLAN.muon_rate
