"""The compressor of a kv source (section 2.3): a run of r tokens becomes one latent.

Shapes: T rows, G completed groups, r tokens a group, C channels, D channels of an entry.
"""

import torch
from torch import Tensor

from engine import numerics
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.rows import GroupPlan
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class Compressor:
    """pooled = sum_t softmax_t(s)_t * u_t, a softmax over the group's tokens for each channel; at ratio 1, u.

    The latent is RMSNorm(pooled): main entries are its rotation, index keys come from it unrotated.
    """

    def __init__(self, config: DeepseekConfig, source: TensorSource, prefix: str, ratio: int) -> None:
        shape = (config.head_dim, config.hidden_size)
        names = ("wkv",) if ratio == 1 else ("wkv", "wgate")
        self.weights = tuple(Dense.of(source.take(f"{prefix}.{name}.weight", shape)) for name in names)
        self._norm = RmsNorm.take(source, f"{prefix}.norm", config.head_dim, config.rms_norm_eps)

    def latents(
        self, operations: Operations, projected: list[Tensor], plan: GroupPlan, open_F: Tensor | None
    ) -> Tensor:
        """[G, D] of the groups that these rows complete.

        `projected`: the rows through `weights`. What groups stay open is left in `open_F`.
        """
        if plan.members is None:
            return self._norm(operations, projected[0])
        assert open_F is not None
        single_TX = torch.cat(projected, 1)
        nothing = torch.zeros(1, single_TX.shape[1])
        values_GrD, gates_GrD = plan.members.exchange(open_F, single_TX, nothing).chunk(2, -1)
        return self._norm(operations, pool_group(values_GrD, gates_GrD))


def pool_group(values_GrD: Tensor, gates_GrD: Tensor) -> Tensor:
    """[G, D]: each channel's values weighted by the softmax of its gates over the group."""
    weights_GrD = (gates_GrD - gates_GrD.amax(1, keepdim=True)).exp()
    weighted = numerics.tree_sum(weights_GrD * values_GrD, 1)
    return weighted / numerics.tree_sum(weights_GrD, 1)
