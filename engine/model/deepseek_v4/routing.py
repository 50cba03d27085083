"""How V4 chooses experts: by scores, or in the first layers by the token's id alone (appendix A.1).

Shapes: T rows, C channels, E experts, K experts a row, V vocabulary.
"""

from torch import Tensor

from engine.model.deepseek.moe import Router, Routes, expert_scores, expert_weights
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class ScoreRouter:
    """V4.1's, without a bias for images."""

    def __init__(self, config: DeepseekV4Config, source: TensorSource, prefix: str) -> None:
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        self._router = Router(config, source, prefix, experts, k, sees_images=False)

    def __call__(self, operations: Operations, x_TC: Tensor, ids_T: Tensor) -> Routes:
        return self._router(operations, x_TC, None)


class HashRouter:
    """Experts from the table `tid2eid`, weights from the scores; no bias."""

    def __init__(self, config: DeepseekV4Config, source: TensorSource, prefix: str) -> None:
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        self._gate = Dense.of(source.take(f"{prefix}.weight", (experts, config.hidden_size)))
        self._experts_VK = source.take(f"{prefix}.tid2eid", (config.vocab_size, k)).long()
        self._scale = config.routed_scaling_factor

    def __call__(self, operations: Operations, x_TC: Tensor, ids_T: Tensor) -> Routes:
        experts_TK = self._experts_VK[ids_T]
        scores_TE = expert_scores(operations, x_TC, self._gate)
        return Routes(experts_TK, expert_weights(scores_TE, experts_TK, self._scale))
