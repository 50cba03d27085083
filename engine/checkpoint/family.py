"""A config.json to the family that it describes: its inventory, and the formats of its weights. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from engine.checkpoint.entries import Entry, Format, Formats
from engine.checkpoint.inventory import v41_entries
from engine.checkpoint.inventory_v4 import v4_entries
from engine.checkpoint.v4_shape import V4Shape
from engine.errors import BrokenModelFile
from engine.model.deepseek.config import DeepseekConfig, Quantisation
from engine.model.deepseek.config_checks import INDEX_GROUP, MAIN_GROUP, WINDOW_GROUP
from engine.model.deepseek.config_fields import Fields, refuse
from engine.model.deepseek.roles import cut_layer

ModelType = Literal["deepseek_v41", "deepseek_v4"]
_RELEASED_BLOCK: Mapping[ModelType, tuple[int, int]] = {"deepseek_v41": (32, 32), "deepseek_v4": (128, 128)}
_MOST_ENTRIES = 200_000  # the largest release implies fewer than 100,000


@dataclass(frozen=True, slots=True)
class Family:
    """One model's config, read. `entries` is its inventory, in the order of the layers."""

    model_type: ModelType
    config: DeepseekConfig | V4Shape
    entries: tuple[Entry, ...]
    formats: Formats

    @property
    def released_block(self) -> tuple[int, int]:
        """Rows and columns of an FP8 block in the family's releases."""
        return _RELEASED_BLOCK[self.model_type]

    @property
    def cut(self) -> int:
        """The decoder's first layer; all layers are before it where no encoder is set apart (section 1.2)."""
        if isinstance(self.config, DeepseekConfig):
            return cut_layer(self.config)
        return self.config.num_hidden_layers

    @property
    def entry_ratios(self) -> frozenset[int]:
        """How many positions an entry of the caches stands for, in layers that keep such."""
        if isinstance(self.config, DeepseekConfig):
            ratios = map(self.config.ratio, range(self.config.num_hidden_layers))
        else:
            ratios = (layer.ratio for layer in self.config.layers)
        return frozenset(filter(None, ratios))


def read_family(raw: Mapping[str, object]) -> Family:
    """Raises BrokenModelFile: field, value, what is expected."""
    match raw.get("model_type"):
        case "deepseek_v41":
            config = _with_released_caches(DeepseekConfig.from_dict(raw, Quantisation.off()))
            return Family("deepseek_v41", config, _listed(v41_entries(config)), _formats("deepseek_v41", raw))
        case "deepseek_v4":
            shape = V4Shape.from_dict(raw)
            return Family("deepseek_v4", shape, _listed(v4_entries(shape)), _formats("deepseek_v4", raw))
        case other:
            raise refuse("model_type", other, "deepseek_v41 or deepseek_v4")


def _listed(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """A number with a few zeros too many in a config must not take all memory."""
    listed = tuple(islice(entries, _MOST_ENTRIES + 1))
    if len(listed) > _MOST_ENTRIES:
        raise BrokenModelFile(
            f"config: it implies more than {_MOST_ENTRIES:,} weights",
            hint="look at the numbers of layers and experts",
        )
    return listed


def _with_released_caches(config: DeepseekConfig) -> DeepseekConfig:
    """No field says how caches are kept: as released, or in float32 where a width fills no group of those."""
    groups = (
        (config.head_dim, WINDOW_GROUP),
        (config.head_dim, MAIN_GROUP),
        (config.index_head_dim, INDEX_GROUP),
    )
    released = all(width % group == 0 for width, group in groups)
    return replace(config, quantisation=Quantisation() if released else Quantisation.off())


def _formats(model_type: ModelType, raw: Mapping[str, object]) -> Formats:
    """`quantization_config` as the releases write it, or one type for all."""
    top = Fields(raw)
    dtype = top.text("dtype", top.text("torch_dtype", "bfloat16"))
    if dtype not in ("bfloat16", "float32"):
        raise refuse("dtype", dtype, "bfloat16 or float32")
    plain: Format = "f32" if dtype == "float32" else "bf16"
    if "quantization_config" not in top:
        return Formats(plain, plain, plain, _RELEASED_BLOCK[model_type])
    quantised = top.inside("quantization_config")
    quantised.only("quant_method", "fp8")
    block = quantised.integers("weight_block_size", list(_RELEASED_BLOCK[model_type]))
    if len(block) != 2 or min(block) < 1:
        raise refuse("quantization_config.weight_block_size", list(block), "two numbers of at least 1")
    dense = _format(quantised, "dense_dtype", ("fp8", "bf16", "f32"))
    experts = _format(quantised, "expert_dtype", ("fp8", "fp4", "bf16", "f32"))
    return Formats(dense, experts, plain, (block[0], block[1]))


def _format(quantised: Fields, name: str, allowed: tuple[Format, ...]) -> Format:
    """The first one is the default."""
    value = quantised.text(name, allowed[0])
    for known in allowed:
        if value == known:
            return known
    raise refuse(f"quantization_config.{name}", value, ", ".join(allowed))


def with_formats(raw: Mapping[str, object], formats: Formats) -> dict[str, object]:
    """The config of the same model in these formats: what `read_family` reads back."""
    out = {key: value for key, value in raw.items() if key not in ("quantization_config", "torch_dtype")}
    out["dtype"] = "float32" if formats.plain == "f32" else "bfloat16"
    if formats.dense == formats.experts == formats.plain:
        return out
    quantised: dict[str, object] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(formats.block),
        "scale_fmt": "ue8m0",
        "expert_dtype": formats.experts,
    }
    if formats.dense != "fp8":
        quantised["dense_dtype"] = formats.dense  # no field of the release: it has FP8 only
    return {**out, "quantization_config": quantised}
