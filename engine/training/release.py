"""A trained nano in the release's own form: FP4 experts, FP8 dense weights and tables (section 11)."""

import shutil
import tempfile
from pathlib import Path

from engine.checkpoint.conversion import Converted, convert
from engine.checkpoint.entries import Formats
from engine.checkpoint.family import with_formats
from engine.checkpoint.folder_writer import FolderWriter
from engine.training.parameters import Parameters, released_tensors
from engine.training.workplace import Workplace

_PLAIN = Formats("f32", "f32", "f32", (32, 32))


def write_plain(place: Workplace, parameters: Parameters, target: Path) -> None:
    """All weights in float32 under the released names. `target` must not exist."""
    with FolderWriter(target, 1 << 30) as writer:
        for name, tensor in released_tensors(parameters):
            writer.add(name, tensor.detach().contiguous())
        writer.copy_companions(place.folder)
        writer.finish(with_formats(place.raw, _PLAIN))


def write_release(place: Workplace, parameters: Parameters, target: Path) -> Converted:
    """Backbone and drafts as they ship. `target` must not exist."""
    with tempfile.TemporaryDirectory(dir=place.folder) as scratch:
        plain = Path(scratch) / "plain"
        write_plain(place, parameters, plain)
        converted = convert(plain, Path(scratch) / "released", experts="fp4", dense="fp8")
        shutil.move(Path(scratch) / "released", target)
    return converted
