"""A folder against its config's inventory: where each weight stands, or what is wrong. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine.checkpoint.entries import FLOATS, Entry, StoredTensor
from engine.checkpoint.family import Family
from engine.checkpoint.folder import CheckpointFolder
from engine.checkpoint.names import Naming, Place, read_naming
from engine.errors import BrokenModelFile


@dataclass(frozen=True, slots=True)
class Location:
    """Where a weight stands and how: `dtype` of its values, `scales` the tensor with its scales."""

    entry: Entry
    place: Place
    dtype: str
    scales: str | None
    block: tuple[int, int]


def locate(folder: CheckpointFolder, family: Family, holds: Callable[[str], bool]) -> Mapping[str, Location]:
    """The weights that `holds` names, by released name. What it leaves out may lack; no others may be there.

    Raises BrokenModelFile: a tensor missing, misshapen, of another type, or without a use.
    """
    naming = read_naming(folder.path, folder.tensors.keys() | folder.absent.keys())
    known: set[str] = set()
    found: dict[str, Location] = {}
    missing: list[Entry] = []
    for entry in family.entries:
        place, scales = naming(entry.name), naming(entry.scale_name).stored
        known |= {place.stored, scales} if entry.kind in ("dense", "expert", "table") else {place.stored}
        if not holds(entry.name):
            continue
        if place.stored in folder.tensors:
            found[entry.name] = _location(folder, family, entry, place, scales)
        else:
            missing.append(entry)
    if missing:
        _refuse_missing(folder, missing, naming)
    if surplus := folder.tensors.keys() - known:
        raise BrokenModelFile(
            f"{folder.path}: {len(surplus)} tensors have no use in this model: {min(surplus)!r}"
            + (", …" if len(surplus) > 1 else ""),
            hint="the weights and config.json do not belong together",
        )
    return found


def _location(folder: CheckpointFolder, family: Family, entry: Entry, place: Place, scales: str) -> Location:
    stored = folder.tensors[place.stored]
    allowed = entry.dtypes if place.is_whole else FLOATS
    if stored.dtype not in allowed:
        raise BrokenModelFile(
            f"{folder.path}: tensor {place.stored!r} is {stored.dtype}, expected {' or '.join(allowed)}"
        )
    if not place.is_whole:
        _check_stack(folder, stored, entry, place)
        return Location(entry, place, stored.dtype, None, (1, 1))
    values, *scale = entry.stored_as(stored.dtype, family.formats.block)
    _check_shape(folder, stored, values.shape)
    block = entry.scale_block(stored.dtype, family.formats.block)
    if not scale and not (entry.kind == "table" and scales in folder.tensors):
        return Location(entry, place, stored.dtype, None, block)
    shape = scale[0].shape if scale else entry.stored_as("F8_E4M3", block)[1].shape
    _check_scales(folder, scales, shape, stored)
    return Location(entry, place, stored.dtype, scales, block)


def _check_scales(folder: CheckpointFolder, name: str, shape: tuple[int, ...], values: StoredTensor) -> None:
    """Powers of two as E8M0 bytes; base models keep them in float32."""
    found = folder.tensors.get(name)
    if found is None:
        raise BrokenModelFile(
            f"{folder.path}: tensor {name!r} is missing, expected shape {list(shape)}: "
            f"{values.name!r} is {values.dtype} and needs it"
        )
    if found.dtype not in ("F8_E8M0", "U8", "F32"):
        raise BrokenModelFile(f"{folder.path}: tensor {name!r} is {found.dtype}, expected F8_E8M0 or F32")
    _check_shape(folder, found, shape)


def _check_stack(folder: CheckpointFolder, stored: StoredTensor, entry: Entry, place: Place) -> None:
    """Experts x rows x columns; gate and up projections are one above the other."""
    rows, columns = entry.shape
    expected = (rows if place.half is None else 2 * rows, columns)
    if stored.shape[1:] != expected or (place.expert or 0) >= stored.shape[0]:
        raise BrokenModelFile(
            f"{folder.path}: tensor {stored.name!r} has shape {list(stored.shape)}, "
            f"expected {list(expected)} for each expert"
        )


def _check_shape(folder: CheckpointFolder, found: StoredTensor, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise BrokenModelFile(
            f"{folder.path}: tensor {found.name!r} has shape {list(found.shape)}, expected {list(expected)}",
            hint="the weights and config.json do not belong together",
        )


def _refuse_missing(folder: CheckpointFolder, missing: list[Entry], naming: Naming) -> None:
    first = missing[0]
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    stored, shape = naming(first.name).stored, list(first.shape)
    if (absent := folder.absent.get(stored)) is not None:
        raise BrokenModelFile(
            f"{folder.path}: file {absent.name!r:.80} with tensor {stored!r}{more} is not there",
            hint="download the files that this worker's part needs",
        )
    raise BrokenModelFile(
        f"{folder.path}: tensor {stored!r} is missing, expected shape {shape}{more}",
        hint="download the folder again, or check that config.json is its own",
    )


def in_shard_order(folder: CheckpointFolder, locations: Mapping[str, Location]) -> Iterator[Location]:
    """File by file, so that each is opened once."""
    yield from sorted(locations.values(), key=lambda location: str(folder.shards[location.place.stored]))
