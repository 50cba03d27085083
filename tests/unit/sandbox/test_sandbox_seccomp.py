"""The filter of system calls, run by an interpreter of the kernel's filter machine."""

import errno
import json
import re
import struct
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.errors import UnsupportedError
from sandbox.policy.seccomp import (
    NUMBERS,
    RULES,
    Condition,
    Machine,
    filter_program,
    oci_seccomp,
    this_machine,
)

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES: tuple[Machine, ...] = get_args(Machine)


def run(program: bytes, number: int, arguments: tuple[int, ...], architecture: int) -> int:
    """What the machine returns: loads of 32 bits, `and`, three jumps, `return`, as in linux/filter.h."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *([0] * 6))[:6])
    steps, at, accumulator = list(struct.iter_unpack("<HBBI", program)), 0, 0
    for _ in range(len(steps)):  # jumps only go forward
        code, when_true, when_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x25: accumulator > operand, 0x35: accumulator >= operand}
            at += when_true if holds[code] else when_false
    raise AssertionError("the program does not return")


def holds(condition: Condition, arguments: tuple[int, ...]) -> bool:
    value = arguments[condition.argument]
    return {
        "equal": value == condition.value,
        "above": value > condition.value,
        "masked": value & condition.mask == condition.value,
    }[condition.comparison]


def verdict(machine: Machine, name: str, *arguments: int) -> int | None:
    """The errno of a call, None where it is allowed."""
    number = NUMBERS[name][MACHINES.index(machine)]
    assert number is not None
    result = run(filter_program(machine), number, arguments, ARCHITECTURES[machine])
    return None if result == ALLOWED else result & 0xFFFF


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param


def test_what_reaches_over_the_sandbox_is_refused(machine: Machine):
    for name in ("keyctl", "add_key", "request_key", "bpf", "mount", "unshare", "io_uring_setup"):
        assert verdict(machine, name) == errno.EPERM, name
    for name in ("clone3", "io_setup"):
        assert verdict(machine, name) == errno.ENOSYS, name


@pytest.mark.parametrize("family", [*range(64), 1 << 31, 1 << 32 | 40])
def test_sockets_are_of_four_families(machine: Machine, family: int):
    expected = None if family in (1, 2, 10, 16) else errno.EAFNOSUPPORT
    for name in ("socket", "socketpair"):
        assert verdict(machine, name, family, 1, 0) == expected


def test_the_kernel_is_asked_for_routes_only(machine: Machine):
    assert verdict(machine, "socket", 16, 3, 0) is None
    assert verdict(machine, "socket", 16, 3, 15) == errno.EPROTONOSUPPORT
    assert verdict(machine, "socket", 2, 1, 6) is None


def test_receive_buffers_keep_their_size_without_an_error(machine: Machine):
    assert verdict(machine, "setsockopt", 3, 1, 8) == 0
    assert verdict(machine, "setsockopt", 3, 1, 7) is None
    assert verdict(machine, "setsockopt", 3, 6, 8) is None


def test_bits_that_the_kernel_does_not_read_change_nothing(machine: Machine):
    for high in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert verdict(machine, "ioctl", 0, high | 0x5412) == errno.EPERM
        assert verdict(machine, "socket", high | 40, 1, 0) == errno.EAFNOSUPPORT
        assert verdict(machine, "clone", high | 0x10000011) == errno.EPERM
    assert verdict(machine, "ioctl", 0, 0x5413) is None
    assert verdict(machine, "clone", 0x11) is None


def test_calls_of_other_architectures_end_the_process(machine: Machine):
    for architecture in (0x40000003, *ARCHITECTURES.values()):
        if architecture != ARCHITECTURES[machine]:
            assert run(filter_program(machine), 1, (), architecture) == KILLED


def test_x32_is_not_there():
    result = run(filter_program("x86_64"), 0x40000000 | 250, (), ARCHITECTURES["x86_64"])
    assert result == 0x00050000 | errno.ENOSYS


_WORDS = st.one_of(
    st.sampled_from([0, 1, 2, 10, 16, 40, 0x5412, 0xC0C0586D, 1 << 28, 1 << 32 | 16, (1 << 64) - 1]),
    st.integers(min_value=0, max_value=(1 << 64) - 1),
)


@settings(deadline=None)
@given(st.sampled_from(MACHINES), st.integers(0, 500), st.tuples(*[_WORDS] * 6))
def test_the_program_is_the_table(machine: Machine, number: int, arguments: tuple[int, ...]):
    at = MACHINES.index(machine)
    names = {name for name, numbers in NUMBERS.items() if numbers[at] == number}
    expected = next(
        (
            0x00050000 | rule.errno
            for rule in RULES
            if names & set(rule.calls) and all(holds(each, arguments) for each in rule.conditions)
        ),
        ALLOWED,
    )
    assert run(filter_program(machine), number, arguments, ARCHITECTURES[machine]) == expected


def test_the_program_fits_the_kernels_limit(machine: Machine):
    assert len(filter_program(machine)) // 8 <= 4096


@pytest.mark.parametrize(
    ("header", "pattern", "at"),
    [
        ("x86_64-linux-gnu/asm/unistd_64.h", r"__NR_(\w+) (\d+)$", 0),
        ("asm-generic/unistd.h", r"__NR(?:3264)?_(\w+) (\d+)$", 1),
    ],
)
def test_numbers_are_the_kernels(header: str, pattern: str, at: int):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"{path} comes with the C library's headers")
    known = {name: int(number) for name, number in re.findall(pattern, path.read_text(), re.MULTILINE)}
    for name, numbers in NUMBERS.items():
        if name in known:
            assert numbers[at] == known[name], name


def test_an_oci_runtime_gets_the_same_table(machine: Machine):
    written = json.loads(json.dumps(oci_seccomp(machine)))
    assert written["defaultAction"] == "SCMP_ACT_ALLOW"
    rules = [(tuple(each["names"]), each["errnoRet"]) for each in written["syscalls"]]
    assert rules == [(rule.calls, rule.errno) for rule in RULES]
    indexes = [[each["index"] for each in rule.get("args", [])] for rule in written["syscalls"]]
    assert all(len(set(each)) == len(each) for each in indexes)  # a runtime takes one condition an argument


def test_a_processor_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError, match="riscv64"):
        this_machine()
