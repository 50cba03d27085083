"""Each way in which a bridge breaks without a word turns the check that is named after it red."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import load_model
from engine.checkpoint.family import read_family
from engine.checkpoint.folder import read_config
from engine.model.deepseek import sequence_state
from engine.model.deepseek.attention import LayerKeys
from engine.model.deepseek.block import Block
from engine.model.deepseek.core_attention import Entries
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek.indexer import Indexer
from engine.model.deepseek.step import Step
from engine.self_check import SelfCheck, check_model
from engine.stage_plan import compare, planned_shares
from protocol.errors import InvalidInput

GOLDEN = Path(__file__).parents[2] / "data" / "v41_golden"
Failed = dict[str, tuple[int, ...]]
PLANNED = {"encoder": 0.8, "bridge": 0.02, "decoder": 0.18}
write_entries: Callable[..., None] = LayerKeys._write_entries  # pyright: ignore[reportPrivateUsage]


def check(golden: str = "a", **settings: Any) -> SelfCheck:
    model = load_model(str(GOLDEN / golden), threads=1, **settings)
    try:
        return check_model(model)
    finally:
        model.close()


def failed() -> Failed:
    """Checks that found something, and the layers that they name."""
    return {finding.check: finding.layers for finding in check().findings if not finding.passed}


def layer_of(keys: LayerKeys) -> int:
    return keys._role.layer  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def break_entries(monkeypatch: pytest.MonkeyPatch, cpu_library: Path) -> Callable[..., None]:
    """Replace how the entries of one layer are written."""

    def install(layer: int, write: Callable[[LayerKeys, Step, list[Tensor]], None]) -> None:
        def broken(self: LayerKeys, step: Step, projected: list[Tensor]) -> None:
            (write if layer_of(self) == layer else write_entries)(self, step, projected)

        monkeypatch.setattr(LayerKeys, "_write_entries", broken)

    return install


@pytest.mark.parametrize("settings", [{}, {"profile": "fast"}, {"replay": False}, {"caches": "float32"}])
@pytest.mark.parametrize("golden", ["a", "b"])
def test_a_sound_model_passes(golden: str, settings: dict[str, Any], cpu_library: Path) -> None:
    found = check(golden, **settings)
    assert found.passed, found
    assert [stage.stage for stage in found.first_token.stages] == ["encoder", "bridge", "decoder"]
    assert all(stage.time_ns > 0 for stage in found.first_token.stages)


def test_an_encoder_that_changes_from_run_to_run(monkeypatch: pytest.MonkeyPatch, cpu_library: Path) -> None:
    call, runs = Block.__call__, [0]

    def unstable(self: Block, *arguments: Any) -> Stream:
        stream = call(self, *arguments)
        runs[0] += 1
        return Stream(stream.x * (1 + 1e-6 * runs[0]), stream.premix)

    monkeypatch.setattr(Block, "__call__", unstable)
    assert "encoder output" in failed()


@pytest.mark.parametrize("layer", [2, 6])
def test_entries_that_are_zeros(break_entries: Callable[..., None], layer: int) -> None:
    def zeros(self: LayerKeys, step: Step, projected: list[Tensor]) -> None:
        write_entries(self, step, projected)
        rows = step.groups(step.cache.sources[layer].ratio).entries
        step.cache.sources[layer].main[rows] = 0

    break_entries(layer, zeros)
    found = failed()
    assert found["bridge written"] == (layer,)
    assert found["bridge used"] == (layer,)


@pytest.mark.parametrize("layer", [4, 6])
def test_entries_that_an_earlier_prompt_left(break_entries: Callable[..., None], layer: int) -> None:
    def nothing(self: LayerKeys, step: Step, projected: list[Tensor]) -> None:
        step.shared.index_keys = {}

    break_entries(layer, nothing)
    found = failed()
    assert found["bridge written"] == (layer,)


def test_entries_of_one_layer_that_stand_one_place_late(break_entries: Callable[..., None]) -> None:
    def late(self: LayerKeys, step: Step, projected: list[Tensor]) -> None:
        write_entries(self, step, projected)
        rows, source = step.groups(step.cache.sources[4].ratio).entries, step.cache.sources[4]
        source.main[rows], source.index[rows] = source.main[rows].roll(1, 0), source.index[rows].roll(1, 0)

    break_entries(4, late)
    assert failed()["bridge placed"] == (4,)


def test_entries_of_one_layer_that_are_another_layers(break_entries: Callable[..., None]) -> None:
    def others(self: LayerKeys, step: Step, projected: list[Tensor]) -> None:
        write_entries(self, step, projected)
        rows, sources = step.groups(step.cache.sources[4].ratio).entries, step.cache.sources
        for kind in ("main", "index"):
            getattr(sources[4], kind)[rows] = getattr(sources[2], kind)[rows]

    break_entries(4, others)
    assert failed() == {"bridge placed": (4,)}


def test_a_hand_off_that_loses_one_layer(monkeypatch: pytest.MonkeyPatch, cpu_library: Path) -> None:
    take = sequence_state.import_state

    def lossy(cache: Any, span: Any, payload: NDArray[Any]) -> None:
        take(cache, span, payload)
        cache.sources[6].main[:] = 0

    monkeypatch.setattr(sequence_state, "import_state", lossy)
    assert failed()["bridge carried"] == (6,)


def test_a_decoder_that_does_not_read_the_bridge(monkeypatch: pytest.MonkeyPatch, cpu_library: Path) -> None:
    find = Indexer._entries  # pyright: ignore[reportPrivateUsage]

    def none(self: Indexer, *arguments: Any) -> Entries:
        found = find(self, *arguments)
        if self._role.kv_source != 6:  # pyright: ignore[reportPrivateUsage]
            return found
        return Entries(found.pool, torch.full_like(found.index, found.first - 1), found.first)

    monkeypatch.setattr(Indexer, "_entries", none)
    assert failed() == {"bridge used": (6,)}


def test_a_model_without_a_bridge_is_refused(cpu_library: Path) -> None:
    model = load_model("smollm2", threads=1)
    with pytest.raises(InvalidInput, match="no encoder"):
        check_model(model)
    model.close()


def test_the_plan_gives_long_prompts_to_the_encoder() -> None:
    """Decoder layers run the last window alone, however long the prompt is."""
    family = read_family(read_config(GOLDEN / "a"))
    short, long = planned_shares(family, 8, 8), planned_shares(family, 32_000, 8)
    assert sum(short.values()) == pytest.approx(1)
    assert short["decoder"] > 0.4
    assert long["decoder"] < 0.001
    assert long["encoder"] > 0.95
    assert long["bridge"] == pytest.approx(1 - long["encoder"], abs=0.001)


@pytest.mark.parametrize(
    ("times", "replay", "compiled", "said"),
    [
        ((80, 2, 18), True, True, "none stands out: the encoder"),
        ((40, 1, 59), False, True, "decoder: replay is off"),
        ((40, 1, 59), True, False, "decoder: the kernels"),
        ((40, 1, 59), True, True, "decoder: its few rows"),
        ((50, 40, 10), True, True, "bridge: small operations"),
        ((995, 2, 3), True, True, "none stands out"),
    ],
)
def test_the_likely_cause_is_named(
    times: tuple[int, int, int], replay: bool, compiled: bool, said: str
) -> None:
    spent = dict(zip(("encoder", "bridge", "decoder"), times, strict=True))
    found = compare(100, spent, PLANNED, replay=replay, compiled=compiled)  # type: ignore[arg-type]
    assert found.cause.startswith(said)
    assert found.as_planned == said.startswith("none")
