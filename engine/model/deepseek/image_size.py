"""How large an image becomes before it is cut into patches, and how many tokens it takes (section 9).

Integers throughout: roots are exact, so no size depends on how a float rounds. Pure.
"""

from dataclasses import dataclass
from math import isqrt

from engine.model.deepseek.vision_config import VisionConfig


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image's canvas in patches, and the places of the language model that it fills."""

    patch_rows: int
    patch_columns: int
    rows: int
    columns: int

    @classmethod
    def of(cls, patch_rows: int, patch_columns: int, ratio: int) -> "ImageGrid":
        """`ratio` patches a side make a place; a place may be filled in part."""
        return cls(patch_rows, patch_columns, -(-patch_rows // ratio), -(-patch_columns // ratio))

    @property
    def num_tokens(self) -> int:
        """Start, then each row's places and its newline, then end."""
        return self.rows * (self.columns + 1) + 2

    def canvas(self, patch: int) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.patch_rows * patch, self.patch_columns * patch


def image_grid(height: int, width: int, vision: VisionConfig) -> ImageGrid:
    """Of an image of that many pixels: at least `min_pixels`, rounded up to whole patches.

    Where that takes more than `max_image_tokens`, the largest of the image's aspect that does not.
    """
    area, least = height * width, vision.min_pixels
    if area < least:
        sides = [_least_multiple(side, least, area, vision.patch_size) for side in (height, width)]
    else:
        sides = [-(-side // vision.patch_size) for side in (height, width)]
    grid = ImageGrid.of(sides[0], sides[1], vision.downsample_ratio)
    return grid if grid.num_tokens <= vision.max_image_tokens else _shrunk(height, width, vision)


def _least_multiple(side: int, least: int, area: int, patch: int) -> int:
    """The least k with k patch >= side sqrt(least / area)."""
    square = -(-side * side * least // (area * patch * patch))
    return isqrt(square - 1) + 1


def _shrunk(height: int, width: int, vision: VisionConfig) -> ImageGrid:
    """Sides floor(side beta / patch) patches; beta brings width or height to the most places that there are.

    With R = H / W and N tokens: most columns w solve R w (w + 1) = N - 2, most rows are R w. An image so wide
    that not one row fits has one row of N - 3 places, one so tall that not one column fits has one column.
    """
    ratio, room = vision.downsample_ratio, vision.max_image_tokens - 2
    columns = (isqrt(4 * room * width // height + 1) - 1) // 2
    rows = (isqrt(height * height + 4 * width * room * height) - height) // (2 * width)
    if rows == 0:
        rows, columns = 1, room - 1
    elif columns == 0:
        rows, columns = room // 2, 1
    if columns * height <= rows * width:  # the width decides
        tall, wide = height * columns * ratio // width, columns * ratio
    else:
        tall, wide = rows * ratio, width * rows * ratio // height
    return ImageGrid.of(max(tall, 1), max(wide, 1), ratio)
