"""Resident memory of this process as the kernel counts it: whoever allocated it, mapped files included."""

from pathlib import Path

_SELF = Path("/proc/self")
_RESET_PEAK = "5"  # proc(5), clear_refs


def now_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    """Since the process began or `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    (_SELF / "clear_refs").write_text(_RESET_PEAK)


def _status(field: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kib) * 1024
