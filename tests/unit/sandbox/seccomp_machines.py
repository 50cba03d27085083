"""Machines that run filters of system calls, for tests: the kernel's, and an OCI runtime's."""

import ctypes
import os
import struct
from ctypes.util import find_library
from typing import Any

from sandbox.policy.call_choices import Choice, Verdict
from sandbox.policy.calls import ALLOW, MACHINES, NUMBERS, Machine

ALLOWED, KILLED, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
Arguments = tuple[int, ...]


def run(program: bytes, number: int, arguments: Arguments, architecture: int) -> tuple[int, int]:
    """What the kernel's machine returns, and after how many comparisons: loads of 32 bits, `and`, jumps and
    `return`, as in linux/filter.h."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *([0] * 6))[:6])
    steps, at, accumulator, compared = list(struct.iter_unpack("<HBBI", program)), 0, 0, 0
    for _ in range(len(steps)):  # jumps only go forward
        code, when_true, when_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            at += operand
        elif code == 0x06:
            return operand, compared
        else:
            compared += 1
            holds = {0x15: accumulator == operand, 0x25: accumulator > operand, 0x35: accumulator >= operand}
            at += when_true if holds[code] else when_false
    raise AssertionError("the program does not return")


def judge(verdict: Verdict, arguments: Arguments) -> int:
    """What a verdict of the table comes to, written apart from all that compiles it."""
    while isinstance(verdict, Choice):
        found = arguments[verdict.argument] & verdict.mask & 0xFFFFFFFF
        verdict = next((then for values, then in verdict.cases if found in values), verdict.otherwise)
    return ALLOWED if verdict == ALLOW else ERRNO | verdict


def number_of(machine: Machine, name: str) -> int:
    number = NUMBERS[name][MACHINES.index(machine)]
    assert number is not None
    return number


def rules_for(written: dict[str, Any], name: str, arguments: Arguments) -> list[dict[str, Any]]:
    """Those of an OCI table that hold for a call."""
    return [rule for rule in written["syscalls"] if name in rule["names"] and _holds(rule, arguments)]


def _holds(rule: dict[str, Any], arguments: Arguments) -> bool:
    conditions: list[dict[str, int]] = rule.get("args", [])
    return all(arguments[each["index"]] & each["value"] == each["valueTwo"] for each in conditions)


def action_of(rule: dict[str, Any]) -> int:
    return ALLOWED if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule["errnoRet"]


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of seccomp.h."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


_MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ


def library() -> ctypes.CDLL | None:
    """libseccomp, by which runc and others make programs of tables; None where it is not installed."""
    name = find_library("seccomp") or "libseccomp.so.2"
    try:
        found = ctypes.CDLL(name, use_errno=True)
    except OSError:
        return None
    found.seccomp_init.restype = ctypes.c_void_p
    return found


def compiled(written: dict[str, Any], lib: ctypes.CDLL, file: int) -> bytes:
    """The program that the library makes of an OCI table for this machine. Names that it does not know are
    left out, as runtimes do."""
    context = ctypes.c_void_p(lib.seccomp_init(ERRNO | written["defaultErrnoRet"]))
    try:
        for rule in written["syscalls"]:
            found = [
                _Comparison(each["index"], _MASKED_EQUAL, each["value"], each["valueTwo"])
                for each in rule.get("args", ())
            ]
            array = (_Comparison * len(found))(*found)
            for name in rule["names"]:
                number = lib.seccomp_syscall_resolve_name(name.encode())
                if number >= 0:
                    done = lib.seccomp_rule_add_array(
                        context, ctypes.c_uint32(action_of(rule)), number, len(found), array
                    )
                    assert done == 0, (name, done)
        assert lib.seccomp_export_bpf(context, file) == 0
    finally:
        lib.seccomp_release(context)
    return os.pread(file, 1 << 20, 0)
