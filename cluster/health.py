"""This machine in a few lines, and checks of what the model plane needs."""

import shutil
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from cluster.config import DockyardConfig
from cluster.plan import plan_workers, this_machine
from engine.model_path import model_path
from kernels.cpu import build
from protocol.errors import DockyardError


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `dockyard doctor`: what it costs where it is not `enforced`, and how to mend it."""

    name: str
    status: Literal["enforced", "degraded", "missing", "unverified"]
    detail: str
    cost: str = ""
    fix: str = ""


def machine_summary() -> dict[str, Any]:
    """The topology, and how busy it is, for `dockyard status`."""
    topology = this_machine()
    load = psutil.getloadavg()
    lines = [*topology.describe().splitlines(), f"load {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}"]
    return {"lines": lines, "load": list(load)}


def model_checks(config: DockyardConfig) -> list[Check]:
    """Model, kernels and memory, each found by trying it."""
    return [_compiler(), _kernels(), *_model(config)]


def _compiler() -> Check:
    if (found := shutil.which("gcc")) is not None:
        return Check("gcc", "enforced", found)
    return Check(
        "gcc",
        "missing",
        "not found",
        "kernels and the sandboxes' init cannot be built",
        "apt-get install gcc",
    )


def _kernels() -> Check:
    if build.library_path().exists():
        return Check("CPU kernels", "enforced", "built for this processor")
    return Check(
        "CPU kernels",
        "degraded",
        "not built",
        "the model runs on PyTorch, several times slower, and slowest in the profile fast",
        "make setup, with gcc installed",
    )


def _model(config: DockyardConfig) -> list[Check]:
    from engine.gguf_file import open_gguf  # brings numpy, which no other command needs

    try:
        path = model_path(config.model)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        detail = f"{len(files)} files" if path.is_dir() else f"{len(open_gguf(path).tensors)} tensors"
    except DockyardError as error:
        return [Check("model", "missing", error.message, "nothing can be served", error.hint)]
    size = sum(file.stat().st_size for file in files)
    found = Check("model", "enforced", f"{config.model}: {size / 1e6:.0f} MB, {detail}")
    try:
        plan = plan_workers(config, path, this_machine())
    except DockyardError as error:
        return [found, Check("memory", "missing", error.message, "the workers do not start", error.hint)]
    return [found, Check("placement", "enforced", f"{len(plan.workers)} workers fit; {plan.reasons[0]}")]
