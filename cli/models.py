"""model: what a model is made of, without its weights; and its weights in other formats."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cli.console import JsonFlag, output, print_json, progress
from protocol.errors import InvalidInput

if TYPE_CHECKING:
    from engine.checkpoint.description import LayerInfo, ModelInfo

app = typer.Typer(
    help="Models: sizes, layers and caches; conversion of weights.",
    no_args_is_help=True,
    epilog="Example: `dockyard model info deepseek-v4.1-flash`",
)

_PROFILES = ("exact", "fast")  # of the engine, in each family; docs/kernels.md
_UNITS = ("", " thousand", " million", " billion")


@app.command("info")
def info(
    model: Annotated[
        str, typer.Argument(help="A built-in name, a folder with a config.json, or a GGUF file.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Say how large a model is, what its caches take and what each layer does. Needs no weights.

    Weights that are in the folder are checked against its config: names, shapes and types.

    Example: dockyard model info deepseek-v4.1-flash --json
    """
    from engine.checkpoint.description import describe

    found = describe(model)
    if as_json:
        print_json(_as_json(model, found))
    else:
        output.print(Group(_sizes(found), "", _layers(found)))
        for note in found.notes:
            output.print(f"note: {note}", markup=False)


@app.command("convert")
def convert_folder(
    source: Annotated[
        str, typer.Argument(help="A built-in name, or a folder of safetensors files with its config.json.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write. It must not exist.")],
    experts: Annotated[
        Literal["fp4", "fp8", "bf16", "f32"], typer.Option(help="Format of the routed experts.")
    ] = "fp4",
    dense: Annotated[
        Literal["fp8", "bf16", "f32"], typer.Option(help="Format of the other matrices and of tables.")
    ] = "fp8",
    max_shard_gb: Annotated[
        float, typer.Option(min=0.001, help="GB of one file; memory that it needs.")
    ] = 4.0,
    as_json: JsonFlag = False,
) -> None:
    """Write a model's weights in other formats: to the release's (the default) or back to plain ones.

    Weights that are in their format already are copied bit for bit. A run that fails leaves no target.

    Example: dockyard model convert ./nano-float32 ./nano --experts fp4 --dense fp8
    """
    from engine.checkpoint.conversion import convert
    from engine.checkpoint.description import describe
    from engine.model_path import model_path

    folder = model_path(source)
    if not folder.is_dir():
        raise InvalidInput(f"source: {folder} is no folder", hint="a GGUF file keeps its formats")
    columns = (TextColumn("{task.percentage:3.0f}% {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=progress, transient=True) as bar:
        task = bar.add_task("reading headers")
        done = convert(
            folder, target, dense=dense, experts=experts, shard_bytes=int(max_shard_gb * 1e9),
            report=lambda at: bar.update(
                task, completed=at.num_done, total=at.num_weights, description=at.name
            ),
        )  # fmt: skip
    for note in describe(str(target)).notes:
        progress.print(f"note: {note}", markup=False)
    if as_json:
        formats = {key: value for key, value in asdict(done.formats).items() if key != "block"}
        print_json({"target": str(target), "tensors": done.num_tensors, "bytes": done.num_bytes, **formats})
    else:
        output.print(f"{target}: {done.num_tensors} tensors, {done.num_bytes / 1e9:.2f} GB", markup=False)


def _as_json(name: str, found: "ModelInfo") -> dict[str, Any]:
    return {
        "model": name,
        "family": found.family,
        "tensors": found.num_tensors,
        "parameters": asdict(found.parameters),
        "active": asdict(found.active),
        "cache_bytes_per_token": found.caches.bytes_per_token,
        "window_bytes": found.caches.window_bytes,
        "draft_window_bytes": found.caches.draft_window_bytes,
        "handoff": None if found.caches.handoff is None else asdict(found.caches.handoff),
        "max_positions": found.max_positions,
        "profiles": _PROFILES,
        "layers": [asdict(layer) for layer in found.layers],
        "files": found.num_files,
        "notes": found.notes,
    }


def _sizes(found: "ModelInfo") -> Table:
    parameters = found.parameters
    rows = {
        "family": found.family,
        "tensors": f"{found.num_tensors:,}",
        "parameters, backbone": _large(parameters.backbone),
        "parameters, Engram tables": _large(parameters.engram),
        "parameters, draft blocks": _large(parameters.draft),
        "parameters, vision": _large(parameters.vision),
        "parameters, other": _large(parameters.other),
        "active at prefill": _large(found.active.prefill),
        "active at decode": _large(found.active.decode),
        "cache": f"{found.caches.bytes_per_token:,.2f} bytes a token",
        "window": f"{found.caches.window_bytes / 1e6:.2f} MB a sequence",
        "positions": f"{found.max_positions:,} at most",
        "profiles": ", ".join(_PROFILES),
        "weights": _files(found.num_files),
    }
    if handoff := found.caches.handoff:
        bounded = handoff.window_bytes + handoff.stream_bytes
        rows["hand-off"] = f"{bounded / 1e6:.2f} MB beside the cache: window and streams"
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in rows.items():
        if value not in ("0", "0.00 MB a sequence"):
            table.add_row(name, value)
    return table


def _layers(found: "ModelInfo") -> Table:
    """Neighbours that do the same are one row."""
    table = Table(box=None, pad_edge=False)
    for heading in ("layers", "role", "ratio", "entries of", "selection of"):
        table.add_column(heading)
    runs: list[list[LayerInfo]] = []
    for layer in found.layers:
        if runs and _does(runs[-1][0]) == _does(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        first, last = run[0], run[-1]
        span = f"{first.layer}" if first is last else f"{first.layer} to {last.layer}"
        table.add_row(span, first.role, str(first.ratio or "-"), *_sources(first))
    return table


def _does(layer: "LayerInfo") -> tuple[object, ...]:
    return layer.role, layer.ratio, *_sources(layer)


def _sources(layer: "LayerInfo") -> tuple[str, str]:
    return _source(layer, layer.kv_source), _source(layer, layer.index_source)


def _source(layer: "LayerInfo", source: int) -> str:
    """Layers that read entries of their own do the same."""
    if source < 0:
        return "-"
    return "itself" if source == layer.layer else str(source)


def _files(count: int) -> str:
    return f"{count} file{'s' if count > 1 else ''}, checked" if count else "none here"


def _large(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f}{_UNITS[unit]}" if unit else f"{count}"
