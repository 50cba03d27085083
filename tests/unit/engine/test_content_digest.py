"""A digest of weights: of their content, wherever it comes from and in whatever order."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model.content_digest import ContentDigest
from protocol.errors import ResourceShortage


@pytest.fixture
def weights() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(40, 7, generator=noise),
        "b.weight": torch.randn(3, 5, generator=noise).to(torch.bfloat16),
        "c.scale": torch.randn(11, generator=noise).to(torch.float8_e4m3fn),
        "d.ids": torch.arange(9),
        "e.none": torch.zeros(0, 4),
    }


def digest_of(weights: dict[str, Tensor]) -> str:
    digest = ContentDigest()
    for name, tensor in weights.items():
        digest.add(name, tensor)
    return digest.hex()


def test_memory_and_shards_in_any_order_give_the_same(weights: dict[str, Tensor], tmp_path: Path) -> None:
    expected = digest_of(weights)
    assert digest_of(dict(reversed(weights.items()))) == expected
    names = list(weights)
    save_file({name: weights[name] for name in names[3:]}, tmp_path / "2.safetensors")
    save_file({name: weights[name] for name in names[:3]}, tmp_path / "1.safetensors", {"format": "pt"})
    digest = ContentDigest()
    for shard in ("2", "1"):
        digest.add_shard(tmp_path / f"{shard}.safetensors")
    assert digest.hex() == expected
    assert len(expected) == 32


def test_without_threads_that_read_shards_it_is_a_shortage(
    weights: dict[str, Tensor], tmp_path: Path, shortage: pytest.MonkeyPatch
) -> None:
    save_file(weights, tmp_path / "1.safetensors")
    digest = ContentDigest()
    with pytest.raises(ResourceShortage, match="no threads that read the weights"):
        digest.add_shard(tmp_path / "1.safetensors")
    shortage.undo()
    digest.add_shard(tmp_path / "1.safetensors")
    assert digest.hex() == digest_of(weights)


def test_views_count_by_what_they_show(weights: dict[str, Tensor]) -> None:
    wide = torch.cat([weights["a.weight"], torch.ones(40, 2)], 1)
    assert digest_of({**weights, "a.weight": wide[:, :7]}) == digest_of(weights)


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "c.scale", "d.ids"])
def test_any_byte_name_type_and_shape_counts(weights: dict[str, Tensor], name: str) -> None:
    tensor = weights[name]
    flipped = tensor.clone().reshape(-1)
    flipped.view(torch.uint8)[-1] ^= 1
    others = [
        {**weights, name: flipped.reshape(tensor.shape)},
        {**weights, name: tensor.reshape(1, *tensor.shape)},
        {**{key: value for key, value in weights.items() if key != name}, f"{name}2": tensor},
        {key: value for key, value in weights.items() if key != name},
        {**weights, name: tensor.view(torch.uint8).reshape(-1)},
    ]
    assert len({digest_of(weights), *map(digest_of, others)}) == 1 + len(others)


def test_what_cannot_be_told_is_refused_by_name(weights: dict[str, Tensor], tmp_path: Path) -> None:
    digest = ContentDigest()
    with pytest.raises(InvalidRequest, match="no tensor was told"):
        digest.hex()
    digest.add("a", weights["a.weight"])
    with pytest.raises(InvalidRequest, match="'a' was told before"):
        digest.add("a", weights["a.weight"])
    with pytest.raises(InvalidRequest, match="complex64"):
        digest.add("z", torch.zeros(2, dtype=torch.complex64))
    save_file(weights, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:-5])
    with pytest.raises(InvalidRequest, match="is cut off"):
        ContentDigest().add_shard(tmp_path / "w.safetensors")
