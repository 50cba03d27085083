"""How one engine is set up."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.cache.tier_config import TierConfig
from kernels.limits import MAX_THREADS

Role = Literal["both", "prefill", "decode"]
MAX_SEQUENCES = 1 << 16  # each has a slot from the start on, which takes memory


class EngineConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2"  # a built-in name or the path of a GGUF file
    role: Role = "both"  # prefill stops after the first token and hands over; decode takes over
    threads: int = Field(default=2, ge=1, le=MAX_THREADS)  # of the CPU kernels; changes no bit of the output
    operations: Literal["auto", "c", "torch"] = "auto"  # auto: the C library where it is built
    profile: Literal["exact", "fast"] = "exact"  # fast: activations in 16 bits, products in integers
    replay: bool = True  # decoder layers see a window of each prompt (DeepSeek-V4.1); false runs all its rows
    # DeepSeek: `released` rounds caches as in training, and refuses widths that fill no group; auto does so
    # for V4.1, and for V4 where the weights have the release's formats too
    caches: Literal["auto", "released", "float32"] = "auto"
    # positions a cache block, a multiple of the model's ratios; None: the least that 16 divides too
    block_tokens: int | None = Field(default=None, ge=1)
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 20)  # 1 GiB holds 23,301 tokens of smollm2
    max_sequences: int = Field(default=32, ge=1, le=MAX_SEQUENCES)  # in one step
    max_waiting: int = Field(default=512, ge=1)  # beyond it `add` refuses, the gateway answers 429
    # rows a step: bounds how long decoding waits for a prefill; up to half are kept for who starves
    token_budget: int = Field(default=256, ge=1)
    starvation_s: float = Field(default=10.0, gt=0)  # who got no row for so long goes before everyone
    # of a preempted sequence's KV; swap needs tiers.host_bytes, and recomputes where these are full
    preemption: Literal["recompute", "swap"] = "recompute"
    kv_events: bool = False  # tell routers what the caches hold: `Engine.events_since`
    kv_event_batches: int = Field(default=10_000, ge=1)  # that are kept for routers who missed some
    tiers: TierConfig = TierConfig()
