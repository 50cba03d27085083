"""One forward step of V4: as V4.1's without a cut, with the tokens' ids and what HCA layers see."""

from torch import Tensor

from engine.model.deepseek.rope import RotaryTables
from engine.model.deepseek.rows import SequenceRows
from engine.model.deepseek.step import Observer, Step
from engine.model.deepseek_v4.cache import DeepseekV4Cache
from engine.model.deepseek_v4.heavy_attention import Visible
from kernels.operations import Operations


class V4Step(Step):
    """`token_ids`: int64 [T], which hash layers route by."""

    def __init__(
        self,
        operations: Operations,
        cache: DeepseekV4Cache,
        tables: RotaryTables,
        sequences: list[SequenceRows],
        observer: Observer | None,
        *,
        token_ids: Tensor,
    ) -> None:
        super().__init__(operations, cache, tables, sequences, observer)
        self.token_ids = token_ids
        self._visible: dict[int, list[Visible]] = {}

    def visible(self, ratio: int) -> list[Visible]:
        """Of each sequence, the entries of a ratio that its rows see."""
        if ratio not in self._visible:
            self._visible[ratio] = Visible.of(self.rows, ratio)
        return self._visible[ratio]
