"""Reads the dynamic section of an ELF file, and shortens its run path in place.

An interpreter that was built with a shared libpython names that library's directory as an absolute path,
which a sandbox does not have. `$ORIGIN/../lib` is shorter than most, so it fits where the old path stood.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What a program asks of the dynamic linker."""

    needed: tuple[str, ...]  # library names
    run_paths: tuple[tuple[int, str], ...]  # file offset of the text, and the text


def read_dynamic(path: Path) -> Dynamic | None:
    """None for what is no dynamically linked 64-bit little-endian ELF file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    segments = _segments(data)
    dynamic = next((each for each in segments if each[0] == _PT_DYNAMIC), None)
    if dynamic is None:
        return None
    entries = list(_DYNAMIC.iter_unpack(_span(data, dynamic[1], dynamic[3])))
    table = next((value for tag, value in entries if tag == _DT_STRTAB), None)
    if table is None:
        return None
    strings = _file_offset(segments, table)
    needed = tuple(_text(data, strings + value) for tag, value in entries if tag == _DT_NEEDED)
    run_paths = tuple(
        (strings + value, _text(data, strings + value))
        for tag, value in entries
        if tag in (_DT_RPATH, _DT_RUNPATH)
    )
    return Dynamic(needed, run_paths)


def replace_run_path(path: Path, run_path: str) -> bool:
    """Writes `run_path` over each run path of the file; False, and no change, where there is none or one is
    too short to hold it."""
    dynamic = read_dynamic(path)
    if dynamic is None or not dynamic.run_paths:
        return False
    if any(len(old) < len(run_path) for _, old in dynamic.run_paths):
        return False
    data = bytearray(path.read_bytes())
    for offset, old in dynamic.run_paths:
        data[offset : offset + len(old)] = run_path.encode().ljust(len(old), b"\0")
    path.write_bytes(data)
    return True


def _segments(data: bytes) -> list[tuple[int, int, int, int]]:
    """(type, file offset, address, size in the file) of each."""
    _, _, _, _, start, _, _, _, size, count, *_ = _HEADER.unpack_from(data)
    found: list[tuple[int, int, int, int]] = []
    for index in range(count):
        kind, _, offset, address, _, length, _, _ = _PROGRAM.unpack_from(data, start + index * size)
        found.append((kind, offset, address, length))
    return found


def _file_offset(segments: list[tuple[int, int, int, int]], address: int) -> int:
    for kind, offset, start, length in segments:
        if kind == _PT_LOAD and start <= address < start + length:
            return offset + address - start
    raise ValueError(f"address {address:#x} is in no segment")


def _span(data: bytes, offset: int, length: int) -> bytes:
    return data[offset : offset + length - length % _DYNAMIC.size]


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode("utf-8", "surrogateescape")
