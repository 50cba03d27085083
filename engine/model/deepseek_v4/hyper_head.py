"""The final hyper-head (appendix A.1): streams to one hidden state, by a mix that is learned.

Shapes: T rows, N streams, C channels.
"""

from torch import Tensor

from engine import numerics
from engine.model.deepseek.hyper_connections import Stream
from engine.model.deepseek_v4.config import DeepseekV4Config
from engine.model.tensor_source import TensorSource
from engine.numerics import Dense
from kernels.operations import Operations


class HyperHead:
    """h = sum_k (sigmoid(scale (fn vec(X)) / rms(vec(X)) + base)_k + hc_eps) X_k."""

    def __init__(self, config: DeepseekV4Config, source: TensorSource, prefix: str) -> None:
        n = config.hc_mult
        self._projection = Dense.of(source.take(f"{prefix}hc_head_fn", (n, n * config.hidden_size)))
        self._base_N = source.take(f"{prefix}hc_head_base", (n,))
        self._scale = source.take(f"{prefix}hc_head_scale", (1,))
        self._eps, self._norm_eps = config.hc_eps, config.rms_norm_eps

    def __call__(self, operations: Operations, x_TNC: Tensor) -> Tensor:
        """[T, C]."""
        flat = x_TNC.flatten(1)
        product_TN = numerics.linear(operations, flat, (self._projection,))[0]
        inverse_T1 = (numerics.mean_square(flat) + self._norm_eps).rsqrt()
        mix_TN = numerics.sigmoid(product_TN * inverse_T1 * self._scale + self._base_N) + self._eps
        return Stream(x_TNC, mix_TN).collapse()
