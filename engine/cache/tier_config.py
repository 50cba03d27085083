"""How much KV is kept beside the device's blocks, where, and how long."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.cache.host_memory import host_memory_bytes

Policy = Literal["write_through", "write_back"]


class TierConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    host_bytes: int = Field(default=0, ge=0)  # of blocks, and of swapped sequences; 0: none are kept
    # of windows, of models that have some, taken as it is needed; unset: a tenth of the memory that a process
    # may use, and of workers that are deployed a tenth of what is free, shared among them
    window_bytes: int | None = Field(default=None, ge=0)
    window_ttl_s: float = Field(
        default=600.0, gt=0
    )  # since they were last used: a tool's run or a person's pause
    # positions of a prompt between kept windows; unset: four windows
    window_interval: int | None = Field(default=None, ge=1)
    disk_path: str = ""  # of a folder that workers of one host may share; empty: no disk
    disk_bytes: int = Field(default=16 << 30, ge=1 << 20)  # of the whole folder, whichever workers share it
    disk_ttl_s: float = Field(default=72 * 3600.0, gt=0)  # since an entry was last used
    # through: blocks are kept as soon as they are full, and survive this process; back: when they are evicted
    policy: Policy = "write_through"
    load_timeout_s: float = Field(default=5.0, gt=0)  # beyond it a request runs without what the disk has

    @model_validator(mode="after")
    def _disk_loads_into_host_memory(self) -> Self:
        if self.disk_path and not self.host_bytes:
            raise ValueError(
                "disk_path needs host_bytes above 0: entries of the disk are loaded into host memory"
            )
        return self

    @property
    def most_window_bytes(self) -> int:
        return host_memory_bytes() // 10 if self.window_bytes is None else self.window_bytes
