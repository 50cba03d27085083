"""A folder and what its config implies, drafts that transformers left out taken off. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from engine.checkpoint.family import Family, read_family
from engine.checkpoint.folder import CheckpointFolder, open_folder
from engine.checkpoint.names import read_naming, saved_by_transformers, transformers_v4

_DRAFTS = "num_nextn_predict_layers"
NO_DRAFTS = "no draft block, though config.json counts one: transformers saves none; loads without"
_DRAFT_NAMES = ("mtp.", "model.mtp.")


def open_model(path: Path, *, partial: bool = False) -> tuple[CheckpointFolder, Family]:
    """`partial` as `open_folder` has it. Raises BrokenModelFile."""
    folder = open_folder(path, partial=partial)
    family = read_family(folder.config)
    if not lacks_drafts(folder, family):
        return folder, family
    without = replace(folder, config={**folder.config, _DRAFTS: 0})
    return without, read_family(without.config)


def lacks_drafts(folder: CheckpointFolder, family: Family) -> bool:
    """transformers has no draft blocks of V4: it saves none, and its config's default counts one.

    Only under its names, and where no tensor of any draft is there: else the folder is not whole.
    """
    names = folder.tensors.keys() | folder.absent.keys()
    return (
        family.model_type == "deepseek_v4"
        and any(entry.section == "draft" for entry in family.entries)
        and read_naming(folder.path, names) in (saved_by_transformers, transformers_v4)
        and not any(name.startswith(_DRAFT_NAMES) for name in names)
    )
