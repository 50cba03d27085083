"""The shape of a vision tower, from the `vision_config` of a checkpoint (fact sheet, section 11.1)."""

from dataclasses import dataclass

from engine.model.deepseek.config import DeepseekConfig
from engine.model.deepseek.config_fields import Fields, refuse

_LEAST_TOKENS = 4  # of an image of one place: start, the place, the end of its row, end


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Fields carry the released names."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int  # pixels a side
    downsample_ratio: int  # patches a side that make one token
    rope_theta: float
    max_image_tokens: int
    min_pixels: int

    @classmethod
    def of(cls, config: DeepseekConfig) -> "VisionConfig":
        """Raises BrokenModelFile: field, value, what is expected."""
        if config.vision_config is None or config.image_token_id is None:
            field = "vision_config" if config.vision_config is None else "image_token_id"
            raise refuse(field, None, "a value: this model cannot see")
        raw = Fields(config.vision_config, "vision_config.")
        raw.only("max_wh_ratio", None, None)
        vision = cls(
            num_hidden_layers=raw.integer("num_hidden_layers"),
            hidden_size=raw.integer("hidden_size"),
            num_attention_heads=raw.integer("num_attention_heads"),
            intermediate_size=raw.integer("intermediate_size"),
            patch_size=raw.integer("patch_size", 14),
            downsample_ratio=raw.integer("downsample_ratio", 3),
            rope_theta=raw.number("rope_theta", 10_000),
            max_image_tokens=raw.integer("max_image_tokens", 1024, least=_LEAST_TOKENS),
            min_pixels=raw.integer("min_pixels", 295_936, least=0),
        )
        if vision.hidden_size % (4 * vision.num_attention_heads):
            expected = (
                f"a multiple of {4 * vision.num_attention_heads}: heads of pairs for rows and for columns"
            )
            raise refuse("vision_config.hidden_size", vision.hidden_size, expected)
        return vision

    @property
    def unit(self) -> int:
        """Pixels a side of one token's place."""
        return self.patch_size * self.downsample_ratio
