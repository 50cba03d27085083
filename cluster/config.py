"""The one configuration tree: YAML in, resolved YAML stored with every run.

Of the environment it passes on what children get; docs/structure.md has the others that read it, and what.
"""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.events_config import KvEventsConfig
from engine.cache.tier_config import TierConfig
from engine.config import MAX_SEQUENCES
from gateway.config import GatewayConfig
from protocol.errors import InvalidInput
from protocol.home import default_home


class WorkersConfig(BaseModel):
    """The engines of a deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disaggregated: bool = True  # one prefill and one decode worker; false: one worker does both
    threads: int = Field(default=0, ge=0)  # a worker; 0 takes what the placement gives
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 20)  # a worker
    max_sequences: int = Field(default=16, ge=1, le=MAX_SEQUENCES)  # in one decode step
    # outputs that may wait for a worker; beyond it a request is answered with 429 and when to come again
    max_waiting: int = Field(default=512, ge=1)
    starvation_s: float = Field(default=10.0, gt=0)  # who got no row for so long goes before everyone
    token_budget: int = Field(default=256, ge=1)  # rows a step
    # positions a cache block, a multiple of the model's ratios; null takes the least that 16 divides too
    block_tokens: int | None = Field(default=None, ge=1)
    # of DeepSeek folders: `released` rounds as in training, `float32` takes widths that fill no group
    caches: Literal["auto", "released", "float32"] = "auto"
    operations: Literal["auto", "c", "torch"] = "auto"
    # decoder layers see a window of each prompt (DeepSeek-V4.1); false runs all its rows, which
    # prompt_logprobs need, and keeps windows on the tiers' disk
    replay: bool = True
    # fast: activations in 16 bits, products in integers; the tokens of exact but for near ties
    profile: Literal["exact", "fast"] = "fast"
    # of a preempted request's KV; swap needs tiers.host_bytes, and recomputes where these are full
    preemption: Literal["recompute", "swap"] = "recompute"
    tiers: TierConfig = TierConfig()  # KV beside a worker's own: host memory, and a disk that workers share
    kv_events: KvEventsConfig = KvEventsConfig()  # told to routers; off until it is enabled


class RayConfig(BaseModel):
    """The local Ray cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object_store_bytes: int = Field(default=512 << 20, ge=80 << 20)  # carries hand-offs: 46 KB a token
    start_timeout_s: float = Field(default=180.0, gt=0)  # for a worker to load its model


class SandboxConfig(BaseModel):
    """Defaults of the sandboxes that evaluations and teams use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    substrate: Literal["function", "container"] = "function"
    memory_mb: int | None = Field(default=None, ge=16)  # None: 512 where the host can enforce a limit
    pids: int = Field(default=128, ge=8)  # pytest with its plugins takes a handful
    disk_mb: int = Field(default=256, ge=1)
    parallel: int = Field(default=2, ge=1)  # gradings at once: they use the model's cores


class DockyardConfig(BaseModel):
    """Everything that a run depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2"
    state_dir: Path = Path()  # empty: DOCKYARD_HOME, else ~/.local/state/dockyard
    gateway: GatewayConfig = GatewayConfig()
    workers: WorkersConfig = WorkersConfig()
    ray: RayConfig = RayConfig()
    sandbox: SandboxConfig = SandboxConfig()

    def resolved_yaml(self) -> str:
        """The whole tree with every default filled in."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: Path | None = None, **overrides: Any) -> DockyardConfig:
    """Read the file, apply overrides (None is no override, `gateway__port` sets a nested field), resolve.

    Raises InvalidInput that names the field and the value.
    """
    values = _read(path) if path else {}
    for name, value in overrides.items():
        if value is not None:
            *parents, leaf = name.split("__")
            _section(values, parents, path)[leaf] = value
    if not values.get("state_dir"):
        values["state_dir"] = str(default_home())
    values["state_dir"] = str(Path(str(values["state_dir"])).absolute())
    try:
        return DockyardConfig.model_validate(values)
    except ValidationError as error:
        raise _refused(error, path) from error


def child_environment(**additions: str) -> dict[str, str]:
    """This process's environment for a child, with additions."""
    return {**os.environ, **additions}


def export_to_children(**values: str) -> None:
    """Set variables that the processes started from here on inherit: Ray reads its own ones from there."""
    os.environ.update(values)


def _section(values: dict[str, Any], names: Sequence[str], path: Path | None) -> dict[str, Any]:
    """The mapping below `names`, made where there is none."""
    section = values
    for name in names:
        found: object = section.get(name)
        if found is None:
            found = section[name] = {}
        if not isinstance(found, dict):
            raise InvalidInput(f"config {path}: {name} is {found!r}: expected a mapping")
        section = cast(dict[str, Any], found)
    return section


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidInput(f"config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"config {path} is not YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise InvalidInput(f"config {path}: expected a mapping at the top, found {type(values).__name__}")
    return cast(dict[str, Any], values or {})


def _refused(error: ValidationError, path: Path | None) -> InvalidInput:
    """The first thing that is wrong."""
    detail = error.errors()[0]
    words = [str(part) for part in detail["loc"]]
    field, where = ".".join(words), f"config {path or 'flags'}"
    if detail["type"] == "extra_forbidden":
        return InvalidInput(f"{where}: there is no field {field}", hint=_known(words))
    fields = "docs/serving.md and cluster/config.py have the fields"
    return InvalidInput(
        f"{where}: {field} is {detail['input']!r}: {detail['msg']}",
        hint=fields if path else "see: dockyard serve --help",
    )


def _known(words: Sequence[str]) -> str:
    """The field that may have been meant, and those that there are beside it."""
    *parents, name = words
    section: type[BaseModel] = DockyardConfig
    for parent in parents:
        section = _section_of(section, parent) or section
    beside = ".".join([*parents, ""])
    near = [f"{beside}{each}" for each in get_close_matches(name, section.model_fields, 1)]
    near += [each for each in _paths(DockyardConfig) if each.rpartition(".")[2] == name]
    meant = f"do you mean {near[0]}? " if near else ""
    return f"{meant}{'.'.join(parents) or 'the tree'} has: {', '.join(section.model_fields)}"


def _paths(section: type[BaseModel]) -> Iterator[str]:
    """Of all fields below it."""
    for name in section.model_fields:
        yield name
        if (below := _section_of(section, name)) is not None:
            yield from (f"{name}.{each}" for each in _paths(below))


def _section_of(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = section.model_fields[name].annotation if name in section.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
