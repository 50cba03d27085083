"""Settings of a HumanEval run."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """The sandbox that one program is graded in. `memory_mb` None runs without a limit where the host can
    enforce none; every other limit holds on every host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    substrate: Literal["function", "container"] = "function"  # made for short lives; needs no OCI runtime
    image: str = "host"  # needs no download, and brings an interpreter
    timeout_s: float = Field(default=10.0, gt=0)  # seconds a program's tests may run; canonical ones need 1
    memory_mb: int | None = Field(default=256, ge=16)  # MiB, files included; canonical ones stay under 50
    pids: int = Field(default=32, ge=8)  # processes and threads; a program needs one
    disk_mb: int = Field(default=16, ge=1)  # MiB that a program may write
    output_kb: int = Field(default=1024, ge=1)  # KiB that a program may print


class HumanEvalConfig(BaseModel):
    """What is asked of which model, how often, and how much at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = "http://127.0.0.1:8000/v1"  # an endpoint of chat completions
    model: str = "smollm2"  # as the endpoint calls it
    attempts: int = Field(default=1, ge=1)  # a problem; pass@k needs at least k
    limit: int | None = Field(default=None, ge=1)  # problems, from the first; None: all 164
    task_ids: tuple[str, ...] = ()  # these problems instead of the first ones
    ks: tuple[int, ...] = ()  # of pass@k; empty: 1 and the number of attempts
    temperature: float = Field(default=0.2, ge=0)  # low favours pass@1; 0 makes all attempts equal
    max_tokens: int = Field(default=512, ge=1)  # of a reply; the longest canonical solution has about 400
    seed: int = Field(default=0, ge=0)  # of the whole run; each attempt draws its own from it
    request_timeout_s: float = Field(default=600.0, gt=0)  # seconds a reply may take, queueing included
    generation_concurrency: int = Field(default=8, ge=1)  # requests at once; the engine batches them
    grading_concurrency: int = Field(default=2, ge=1)  # sandboxes at once; about one a core
    infrastructure_retries: int = Field(default=1, ge=0)  # of an attempt whose endpoint or sandbox failed
    retry_delay_s: float = Field(default=1.0, ge=0)  # seconds before such a retry; a restart needs a moment
    sandbox: SandboxSettings = SandboxSettings()


# May differ when a run is resumed: they change how much is run and how fast, never what one attempt is.
RESUMABLE_FIELDS = frozenset(
    {
        "base_url",
        "attempts",
        "limit",
        "task_ids",
        "ks",
        "request_timeout_s",
        "generation_concurrency",
        "grading_concurrency",
        "infrastructure_retries",
        "retry_delay_s",
    }
)
