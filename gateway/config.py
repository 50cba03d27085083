"""How a gateway is set up."""

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"  # loopback: there is no authentication yet
    port: int = Field(default=8000, ge=0, le=65535)  # vLLM's default; 0 takes a free one
    default_max_tokens: int = Field(default=1024, ge=1)  # where a request names none: a small model rambles
    max_choices: int = Field(default=16, ge=1)  # `n` of one request
    max_body_bytes: int = Field(default=8 << 20, ge=1024)  # of one request
    body_timeout_s: float = Field(default=30.0, gt=0)  # for a request's body to be there whole
    drain_s: float = Field(default=30.0, ge=0)  # how long SIGTERM waits for running requests
