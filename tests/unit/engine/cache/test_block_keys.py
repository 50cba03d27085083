"""Keys of blocks: the same in every process, and different wherever the content may differ."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.keys import ImageKey, block_key, images_of, root_key

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


def test_keys_do_not_depend_on_the_process() -> None:
    program = (
        "from engine.cache.keys import block_key, root_key\n"
        "print(block_key(root_key('m', 'v', 's'), (1, 2, 3)).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {block_key(root_key("m", "v", "s"), (1, 2, 3)).hex() + "\n"}


def test_model_version_and_salt_start_other_chains() -> None:
    roots = [
        root_key(*parts) for parts in (("m",), ("n",), ("m", "v"), ("m", "", "v"), ("mv",), ("m", "v", "s"))
    ]
    assert len(set(roots)) == len(roots)


@given(one=tokens, other=tokens)
def test_a_key_covers_its_tokens_and_everything_before_it(one: list[int], other: list[int]) -> None:
    root = root_key("m")
    assert (block_key(root, one) == block_key(root, other)) == (one == other)
    assert (block_key(block_key(root, one), other) == block_key(block_key(root, other), other)) == (
        one == other
    )


def test_images_and_resumed_windows_are_told_apart() -> None:
    root, ids = root_key("m"), (7, 7, 7, 7)
    variants = [
        block_key(root, ids),
        block_key(root, ids, resumed=True),
        *(block_key(root, ids, (image,)) for image in (ImageKey(0, 4, "a"), ImageKey(0, 4, "b"))),
        block_key(root, ids, (ImageKey(1, 4, "a"),)),
    ]
    assert len(set(variants)) == len(variants)


def test_a_block_has_the_images_that_touch_it() -> None:
    images = (ImageKey(2, 6, "a"), ImageKey(6, 8, "b"))
    assert images_of(images, 0, 2) == ()
    assert images_of(images, 4, 8) == (ImageKey(-2, 2, "a"), ImageKey(2, 4, "b"))
