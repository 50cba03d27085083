"""Sizes of images: never more tokens than there may be, the aspect kept within a patch, every edge exact."""

from decimal import Decimal, getcontext
from math import ceil, floor

import numpy as np
import pytest
import torch
from dspark_models import raw_config
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.family import read_family
from engine.errors import BrokenModelFile, InvalidRequest
from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.image import fitted, letterbox, patch_image
from engine.model.deepseek.image_size import ImageGrid, image_grid
from engine.model.deepseek.vision_config import VisionConfig

getcontext().prec = 60
RELEASE = VisionConfig(32, 1024, 16, 2816, 14, 3, 10000, 1024, 295936)
SIDES = st.integers(1, 200_000)
SHAPES = st.builds(
    VisionConfig,
    *map(st.just, (1, 64, 4, 48)),
    st.integers(1, 16),
    st.integers(1, 4),
    st.just(10000.0),
    st.integers(4, 1100),
    st.integers(0, 300_000),
)


@given(SIDES, SIDES, st.one_of(st.just(RELEASE), SHAPES))
@settings(max_examples=400)
def test_tokens_are_bounded_and_the_aspect_is_kept_within_a_patch(height, width, vision):
    grid = image_grid(height, width, vision)
    assert 4 <= grid.num_tokens <= vision.max_image_tokens
    tall, wide = grid.canvas(vision.patch_size)
    patch = vision.patch_size
    # Some scale brings both sides to within a patch of the canvas.
    assert Decimal(tall - patch) / height <= Decimal(wide + patch) / width
    assert Decimal(wide - patch) / width <= Decimal(tall + patch) / height


@given(SIDES, SIDES, st.one_of(st.just(RELEASE), SHAPES))
@settings(max_examples=400)
def test_sizes_follow_the_released_rule(height, width, vision):
    """The rule as it is written, with roots of sixty digits."""
    p, unit, n = vision.patch_size, vision.unit, vision.max_image_tokens
    scale = (Decimal(vision.min_pixels) / (height * width)).sqrt()
    scale = max(scale, Decimal(1))
    sides = [ceil(side * scale / p - Decimal("1e-40")) for side in (height, width)]
    rows, columns = (ceil(Decimal(side) / vision.downsample_ratio) for side in sides)
    if rows * (columns + 1) + 2 > n:
        r, edge = Decimal(height) / width, Decimal("1e-40")
        most_columns = (Decimal(n - 2) / r + Decimal("0.25")).sqrt() - Decimal("0.5")
        w, h = floor(most_columns + edge), floor(r * most_columns + edge)
        if h == 0:
            w, h = n - 3, 1
        if w == 0:
            w, h = 1, (n - 2) // 2
        beta = min(Decimal(w * unit) / width, Decimal(h * unit) / height)
        sides = [max(1, floor(side * beta / p + edge)) for side in (height, width)]
    grid = image_grid(height, width, vision)
    assert [grid.patch_rows, grid.patch_columns] == sides


@pytest.mark.parametrize(
    ("size", "patches", "tokens"),
    [
        ((544, 544), (39, 39), 13 * 14 + 2),
        ((10, 10), (39, 39), 13 * 14 + 2),  # scaled up to min_pixels
        ((1080, 1920), (69, 122), 23 * 42 + 2),  # shrunk
        ((1, 100_000), (1, 3063), 1024),  # one row
        ((100_000, 1), (1533, 1), 1024),  # one column
        ((1302, 1302), (93, 93), 31 * 32 + 2),  # just fits
        ((1303, 1303), (93, 93), 31 * 32 + 2),  # just does not
    ],
)
def test_released_sizes(size, patches, tokens):
    grid = image_grid(*size, RELEASE)
    assert ((grid.patch_rows, grid.patch_columns), grid.num_tokens) == (patches, tokens)


@given(SIDES, SIDES, st.integers(1, 2000), st.integers(1, 2000))
def test_an_image_fits_its_canvas_in_its_aspect(height, width, tall, wide):
    h, w = fitted(height, width, (tall, wide))
    assert 1 <= h <= tall
    assert 1 <= w <= wide
    assert h == tall or w == wide
    expected = min(tall / height, wide / width)
    assert h == 1 or abs(h - height * expected) < 0.51
    assert w == 1 or abs(w - width * expected) < 0.51


def test_grey_surrounds_what_does_not_fill_the_canvas():
    pixels = np.full((4, 8, 3), 200, np.uint8)
    boxed = letterbox(pixels, (10, 12))
    assert boxed.shape == (3, 10, 12)
    assert torch.equal(boxed[:, 2:8], torch.full((3, 6, 12), 200.0))
    assert (boxed[:, :2] == 127).all()
    assert (boxed[:, 8:] == 127).all()


def test_patches_are_channel_by_channel_and_row_by_row():
    vision = VisionConfig(1, 64, 4, 48, 2, 3, 10000.0, 1024, 0)
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    image = patch_image(pixels, vision)
    assert image.grid == ImageGrid(2, 3, 1, 1)
    for row in range(2):
        for column in range(3):
            corner = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            expected = [corner[y, x, c] / 127.5 - 1 for c in range(3) for y in range(2) for x in range(2)]
            found = image.patches[3 * row + column]
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_resizing_is_close_to_an_exact_bicubic_of_a_smooth_image():
    y, x = np.mgrid[0:40, 0:60]
    pixels = np.stack([100 + y + x, 80 + 2 * y, 30 + 3 * x], -1).astype(np.uint8)
    boxed = letterbox(pixels, (20, 30))
    middle = pixels.reshape(20, 2, 30, 2, 3).mean((1, 3)).transpose(2, 0, 1)
    inner = np.abs(boxed.numpy() - middle)[:, 3:-3, 3:-3]
    assert inner.max() <= 1


def test_patches_are_the_same_on_every_number_of_threads():
    pixels = np.random.default_rng(0).integers(0, 256, (700, 431, 3), dtype=np.uint8)
    expected, before = patch_image(pixels, RELEASE).patches, torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(patch_image(pixels, RELEASE).patches, expected)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((3, 3), np.uint8), r"an image is uint8 \[3, 3\], expected uint8 \[height, width, 3\]"),
        (np.zeros((3, 3, 4), np.uint8), r"an image is uint8 \[3, 3, 4\]"),
        (np.zeros((3, 3, 3), np.float32), r"an image is float32 \[3, 3, 3\]"),
        (np.zeros((0, 3, 3), np.uint8), r"an image is uint8 \[0, 3, 3\]"),
        (
            np.broadcast_to(np.uint8(0), (9000, 9000, 3)),
            "has 9000 x 9000 pixels, expected at most 67,108,864",
        ),
    ],
)
def test_what_is_no_image_is_refused(pixels, message):
    with pytest.raises(InvalidRequest, match=message):
        patch_image(pixels, RELEASE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_wh_ratio": 3.0}, "vision_config.max_wh_ratio' is 3.0, expected None"),
        ({"max_image_tokens": 3}, "vision_config.max_image_tokens' is 3, expected an integer of at least 4"),
        ({"hidden_size": 60}, "vision_config.hidden_size' is 60, expected a multiple of 16"),
        ({"patch_size": 0}, "vision_config.patch_size' is 0"),
        ({"num_hidden_layers": None}, "vision_config.num_hidden_layers' is None, expected an integer"),
    ],
)
def test_configs_that_cannot_see_are_refused(fields, message):
    raw = raw_config()
    raw["vision_config"] = raw["vision_config"] | fields
    with pytest.raises(BrokenModelFile, match=message):
        VisionConfig.of(DeepseekConfig.from_dict(raw))


@pytest.mark.parametrize("field", ["vision_config", "image_token_id"])
def test_a_model_without_a_tower_says_so(field):
    raw = raw_config()
    del raw[field]
    with pytest.raises(BrokenModelFile, match=f"field '{field}' is None, expected a value: this model"):
        VisionConfig.of(DeepseekConfig.from_dict(raw))


@pytest.mark.parametrize("field", ["patch_size", "downsample_ratio"])
def test_names_of_a_folder_follow_the_towers_own_defaults(field):
    """What a tower may leave out, the list of its tensors may too: the release's values."""
    raw = raw_config()
    raw["vision_config"] = {**raw["vision_config"], "patch_size": 14, "downsample_ratio": 3}
    whole = {entry.name: entry.shape for entry in read_family(raw).entries}
    del raw["vision_config"][field]
    assert {entry.name: entry.shape for entry in read_family(raw).entries} == whole
    raw["vision_config"][field] = 0
    with pytest.raises(BrokenModelFile, match=f"vision_config.{field}' is 0"):
        read_family(raw)
