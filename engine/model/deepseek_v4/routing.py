"""V4's experts, chosen by scores, or in the first layers by the token's id alone (appendix A.1).

Shapes: T rows, C channels, E experts, K experts a row, V vocabulary.
"""

import torch
from torch import Tensor

from engine.errors import BrokenModelFile
from engine.model.deepseek.moe import (
    Experts,
    MixtureOfExperts,
    Routes,
    Share,
    expert_scores,
    expert_weights,
)
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class ScoredExperts:
    """V4.1's, without a bias for images."""

    def __init__(
        self,
        config: DeepseekV4Config,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        share: Share | None = None,
    ) -> None:
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        self._experts = MixtureOfExperts(
            config, source, operations, prefix, experts=experts, experts_per_row=k, sees_images=False,
            share=share,
        )  # fmt: skip

    def __call__(self, operations: Operations, x_TC: Tensor, ids_T: Tensor) -> Tensor:
        """[T, C], whatever the ids."""
        return self._experts(operations, x_TC, None)


class HashRouter:
    """Experts from the table `tid2eid`, weights from the scores; no bias."""

    def __init__(self, config: DeepseekV4Config, source: TensorSource, prefix: str) -> None:
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        self.gate = Dense.of(source.take(f"{prefix}.weight", (experts, config.hidden_size)))
        table_VK = source.take(f"{prefix}.tid2eid", (config.vocab_size, k)).long()
        self.experts_VK = _checked(table_VK, experts)
        self._scale = config.routed_scaling_factor

    def __call__(self, operations: Operations, x_TC: Tensor, ids_T: Tensor) -> Routes:
        experts_TK = self.experts_VK[ids_T]
        scores_TE = expert_scores(operations, x_TC, self.gate)
        return Routes(experts_TK, expert_weights(scores_TE, experts_TK, self._scale))


def _checked(experts_VK: Tensor, num_experts: int) -> Tensor:
    """The table; a token may have an expert more than once. Raises BrokenModelFile: one that is none."""
    outside_V = ((experts_VK < 0) | (experts_VK >= num_experts)).any(1)
    if bool(outside_V.any()):
        token = int(outside_V.nonzero()[0])
        raise BrokenModelFile(
            f"tid2eid: token {token} has the experts {[int(e) for e in experts_VK[token]]}, expected 0 to "
            f"{num_experts - 1}"
        )
    return experts_VK


class HashedExperts:
    """A hash router and its experts: all of them, or a rank's share."""

    def __init__(
        self,
        config: DeepseekV4Config,
        source: TensorSource,
        operations: Operations,
        prefix: str,
        share: Share | None = None,
    ) -> None:
        self._router = HashRouter(config, source, f"{prefix}.gate")
        self._experts = Experts(config, source, operations, prefix, config.n_routed_experts, share=share)
        no_bias_E = torch.zeros(config.n_routed_experts)
        k = config.num_experts_per_tok
        self._fused = self._experts.fused(self._router.gate, no_bias_E, no_bias_E, k)

    def __call__(self, operations: Operations, x_TC: Tensor, ids_T: Tensor) -> Tensor:
        """[T, C] of tokens with these ids, int64 [T]."""
        if operations.fused is not None and self._fused is not None:
            return operations.fused.mixture(self._fused, x_TC, self._router.experts_VK[ids_T], None)
        return self._experts(operations, x_TC, self._router(operations, x_TC, ids_T))
