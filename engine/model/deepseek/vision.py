"""The vision tower: an image as embeddings of the language model (section 9).

Shapes: N patches, C channels of the tower, M places of the language model, X its channels, r patches a side
of a place.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.image import PatchedImage, patch_image
from engine.model.deepseek.image_size import ImageGrid
from engine.model.deepseek.norm import RmsNorm
from engine.model.deepseek.vision_block import NORM_EPS, Affine, PlaneAngles, VisionBlock
from engine.model.deepseek.vision_config import VisionConfig
from engine.model.tensor_source import TensorSource
from kernels.operations import Operations


class VisionTower:
    """Weights and arithmetic of `vision.*`, `aligner.*` and the delimiters. Not thread-safe."""

    def __init__(self, config: DeepseekConfig, source: TensorSource, operations: Operations) -> None:
        """Raises BrokenModelFile: a tensor missing or misshapen, or a config without a tower."""
        self.config, self._operations = VisionConfig.of(config), operations
        vision, x = self.config, config.hidden_size
        c, patch = vision.hidden_size, 3 * vision.patch_size**2
        self._embedding = Affine.take(source, "vision.patch_embed.proj", c, patch)
        self._blocks = [
            VisionBlock(vision, source, f"vision.blocks.{block}") for block in range(vision.num_hidden_layers)
        ]
        self._norm = RmsNorm.take(source, "vision.norm", c, NORM_EPS)
        self._aligner_in = Affine.take(source, "aligner.w1", x, c * vision.downsample_ratio**2)
        self._aligner_out = Affine.take(source, "aligner.w2", x, x)
        self._start_X, self._newline_X, self._end_X = (
            source.take(f"image_{name}", (x,)) for name in ("start", "newline", "end")
        )

    def patch(self, pixels: NDArray[np.uint8]) -> PatchedImage:
        """Of uint8 RGB [height, width, 3]; needs no weights. Raises InvalidRequest: anything else."""
        return patch_image(pixels, self.config)

    @torch.inference_mode()
    def embed(self, image: PatchedImage) -> Tensor:
        """[num_tokens, X]: what stands in the placeholders of the image's span. Blocks for seconds."""
        ops, grid = self._operations, image.grid
        x_NC = self._embedding(ops, image.patches)
        head = self.config.hidden_size // self.config.num_attention_heads
        angles = PlaneAngles.of(grid, head, self.config.rope_theta)
        for block in self._blocks:
            x_NC = block(ops, x_NC, angles)
        joined = join_patches(self._norm(ops, x_NC), grid, self.config.downsample_ratio)
        return self._span(self._aligner_out(ops, gelu(self._aligner_in(ops, joined))), grid)

    def _span(self, places_MX: Tensor, grid: ImageGrid) -> Tensor:
        """Start, each row with its newline, end."""
        rows = places_MX.view(grid.rows, grid.columns, -1)
        newlines = self._newline_X.expand(grid.rows, 1, -1)
        body = torch.cat((rows, newlines), 1).flatten(0, 1)
        return torch.cat((self._start_X[None], body, self._end_X[None]))


def join_patches(x_NC: Tensor, grid: ImageGrid, ratio: int) -> Tensor:
    """[M, C r r]: r x r patches a place, channel by channel; zeros where the canvas ends within a place."""
    plane = x_NC.view(grid.patch_rows, grid.patch_columns, -1)
    right, below = grid.columns * ratio - grid.patch_columns, grid.rows * ratio - grid.patch_rows
    plane = F.pad(plane, (0, 0, 0, right, 0, below))
    places = plane.view(grid.rows, ratio, grid.columns, ratio, -1)
    return places.permute(0, 2, 4, 1, 3).reshape(grid.rows * grid.columns, -1)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), exact."""
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
