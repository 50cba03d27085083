"""From pixels to patches (section 9): resized, set on a grey canvas of whole patches, cut.

Shapes: N patches, P = 3 * patch * patch values of one, channel by channel.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engine.errors import InvalidRequest
from engine.model.deepseek.image_size import ImageGrid, image_grid
from engine.model.deepseek.vision_config import VisionConfig

_GREY = 127
_MOST_PIXELS = 1 << 26  # 0.8 GB while it is resized; more shows nothing at 1,024 tokens


@dataclass(frozen=True, slots=True)
class PatchedImage:
    """What the tower reads."""

    patches: Tensor  # [N, P], row by row of the canvas; values in -1 .. 1
    grid: ImageGrid


def patch_image(pixels: NDArray[np.uint8], vision: VisionConfig) -> PatchedImage:
    """Of uint8 RGB [height, width, 3]. Raises InvalidRequest where it is anything else, or too large."""
    _check(pixels)
    grid = image_grid(pixels.shape[0], pixels.shape[1], vision)
    canvas = letterbox(pixels, grid.canvas(vision.patch_size)) / 127.5 - 1
    size = vision.patch_size
    cut = canvas.view(3, grid.patch_rows, size, grid.patch_columns, size)
    return PatchedImage(cut.permute(1, 3, 0, 2, 4).reshape(-1, 3 * size * size), grid)


def _check(pixels: NDArray[np.uint8]) -> None:
    shape, kind = list(pixels.shape), pixels.dtype
    if len(shape) != 3 or shape[2] != 3 or 0 in shape or kind != np.uint8:
        raise InvalidRequest(
            f"an image is {kind} {shape}, expected uint8 [height, width, 3]",
            parameter="messages", hint="convert it to RGB, eight bits a channel",
        )  # fmt: skip
    if shape[0] * shape[1] > _MOST_PIXELS:
        raise InvalidRequest(
            f"an image has {shape[0]} x {shape[1]} pixels, expected at most {_MOST_PIXELS:,}",
            parameter="messages", hint="scale it down",
        )  # fmt: skip


def letterbox(pixels: NDArray[np.uint8], canvas: tuple[int, int]) -> Tensor:
    """float32 [3, height, width] of whole numbers 0 .. 255: the image in its aspect, grey beside it.

    Bicubic with anti-aliasing; centred.
    """
    height, width = fitted(pixels.shape[0], pixels.shape[1], canvas)
    image = torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)
    if (height, width) != image.shape[1:]:
        image = F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0]
        image = image.round().clamp(0, 255)
    top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
    padding = (left, canvas[1] - width - left, top, canvas[0] - height - top)
    return F.pad(image, padding, value=_GREY).contiguous()


def fitted(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest size of an aspect inside a canvas, to the nearest pixel."""
    if height * canvas[1] > canvas[0] * width:
        return canvas[0], max(1, (2 * width * canvas[0] + height) // (2 * height))
    return max(1, (2 * height * canvas[1] + width) // (2 * width)), canvas[1]
