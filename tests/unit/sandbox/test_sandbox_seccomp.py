"""The filter of system calls, run by an interpreter of the kernel's filter machine."""

import errno
import json
import re
import struct
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seccomp_machines import (
    ALLOWED,
    ARCHITECTURES,
    ERRNO,
    KILLED,
    Arguments,
    action_of,
    compiled,
    judge,
    library,
    number_of,
    rules_for,
    run,
)

from sandbox.errors import UnsupportedError
from sandbox.policy import calls
from sandbox.policy.call_choices import CHOICES, OTHERWISE, Choice, Verdict, verdict_of
from sandbox.policy.calls import MACHINES, Machine, known_calls, parse
from sandbox.policy.seccomp import NUMBERS, filter_program, oci_beside_program, oci_seccomp, this_machine

PRCTL_SET_MM, PRCTL_MERGE, PRCTL_CORES = 35, 67, 62
NEWEST = 469
NOTHING = (0,) * 6


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param


def verdict(machine: Machine, name: str, *arguments: int) -> int | None:
    """The errno of a call, None where it is allowed."""
    number = number_of(machine, name)
    result, _ = run(filter_program(machine), number, arguments, ARCHITECTURES[machine])
    return None if result == ALLOWED else result & 0xFFFF


def test_what_reaches_over_the_sandbox_is_refused(machine: Machine):
    refused = (
        *("keyctl", "add_key", "request_key", "bpf", "mount", "unshare", "io_uring_setup", "userfaultfd"),
        *(
            "perf_event_open",
            "open_by_handle_at",
            "name_to_handle_at",
            "setns",
            "process_vm_readv",
            "vmsplice",
        ),
        *("open_tree", "open_tree_attr", "fsopen", "move_mount", "kexec_file_load", "finit_module", "syslog"),
        *("lsm_set_self_attr", "file_setattr", "move_pages", "pidfd_getfd", "quotactl", "settimeofday"),
    )
    for name in refused:
        assert verdict(machine, name) == errno.EPERM, name
    for name in ("clone3", "io_setup", "io_submit", "mbind"):
        assert verdict(machine, name) == errno.ENOSYS, name


def test_what_programs_live_on_is_allowed(machine: Machine):
    allowed = (
        *(
            "read",
            "write",
            "openat",
            "mmap",
            "execve",
            "wait4",
            "futex",
            "getpid",
            "rt_sigaction",
            "epoll_pwait",
        ),
        *(
            "statx",
            "getrandom",
            "memfd_create",
            "ptrace",
            "seccomp",
            "rseq",
            "landlock_restrict_self",
            "pidfd_open",
        ),
        *(
            "mknodat",
            "chown" if machine == "x86_64" else "fchownat",
            "setuid",
            "sched_setaffinity",
            "inotify_init1",
        ),
    )
    for name in allowed:
        assert verdict(machine, name) is None, name


def test_what_waits_for_every_disk_does_nothing(machine: Machine):
    assert (verdict(machine, "sync"), verdict(machine, "syncfs")) == (0, 0)
    assert verdict(machine, "fsync") is None


def test_calls_that_the_table_does_not_have_are_not_there(machine: Machine):
    """Those of later kernels, and those that never were."""
    never = {"x86_64": 181, "aarch64": 250}[machine]
    for number in (never, NEWEST + 1, 511, 1023, 0x3FFFFFFF):
        result, _ = run(filter_program(machine), number, NOTHING, ARCHITECTURES[machine])
        assert result == ERRNO | errno.ENOSYS, number


@pytest.mark.parametrize("family", [*range(64), 1 << 31, 1 << 32 | 40])
def test_sockets_are_of_four_families(machine: Machine, family: int):
    expected = None if family in (1, 2, 10, 16) else errno.EAFNOSUPPORT
    for name in ("socket", "socketpair"):
        assert verdict(machine, name, family, 1, 0) == expected


def test_the_kernel_is_asked_for_routes_only(machine: Machine):
    assert verdict(machine, "socket", 16, 3, 0) is None
    for protocol in (9, 12, 15, 16, 20):  # audit, netfilter, uevents, generic, socket diagnosis is 4
        assert verdict(machine, "socket", 16, 3, protocol) == errno.EPROTONOSUPPORT
    assert verdict(machine, "socket", 2, 1, 6) is None


def test_receive_buffers_keep_their_size_without_an_error(machine: Machine):
    assert verdict(machine, "setsockopt", 3, 1, 8) == 0
    assert verdict(machine, "setsockopt", 3, 1, 7) is None
    assert verdict(machine, "setsockopt", 3, 6, 8) is None


def test_a_process_makes_no_namespace_by_clone(machine: Machine):
    for bit in range(32):
        expected = errno.EPERM if 0x7E020000 >> bit & 1 else None
        assert verdict(machine, "clone", 1 << bit | 0x11) == expected, bit
    assert verdict(machine, "clone", 0x3D0F00) is None  # a thread


def test_what_debuggers_ask_of_a_personality_is_allowed_and_no_more(machine: Machine):
    for value in (0, 8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF):
        assert verdict(machine, "personality", value) is None
    for value in (0x400000, 0x440000, 0x100000, 1, 6):
        assert verdict(machine, "personality", value) == errno.EPERM


def test_a_process_changes_its_own_limits_alone(machine: Machine):
    for high in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert verdict(machine, "prlimit64", high) is None
        for pid in (1, 2, 1 << 22, 0xFFFFFFFF):
            assert verdict(machine, "prlimit64", high | pid) == errno.EPERM


def test_options_of_a_process_are_its_own(machine: Machine):
    for option in (1, 4, 15, 22, 38, 47, 0x53564D41, 0x59616D61):
        assert verdict(machine, "prctl", option) is None
    for option in (PRCTL_SET_MM, PRCTL_MERGE, PRCTL_CORES, 31, 33, 57, 79, 1000):
        assert verdict(machine, "prctl", option) == errno.EINVAL


def test_of_file_systems_only_what_reads_and_clones_is_allowed(machine: Machine):
    reads = (0x80086601, 0xC020660B, 0x40049409, 0x4020940D, 0xC0189436, 0x801C581F)
    others = (0x5401, 0x5413, 0x541B, 0x8912, 0x12, 0x1277, 0xF50C, 0)
    for request in (*reads, *others):
        assert verdict(machine, "ioctl", 3, request) is None, hex(request)
    keys, flags = (0x5412, 0x541C, 0x5423), (0x40086602, 0x401C5820)
    maintenance = (0xC0C0586D, 0xC0045877, 0xC0185879, 0x8004587D, 0x40086610, 0xC028660F, 0x50009401)
    for request in (*keys, *flags, *maintenance):
        assert verdict(machine, "ioctl", 3, request) == errno.EPERM, hex(request)


def test_bits_that_the_kernel_does_not_read_change_nothing(machine: Machine):
    for high in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert verdict(machine, "ioctl", 0, high | 0x5412) == errno.EPERM
        assert verdict(machine, "ioctl", 0, high | 0x5413) is None
        assert verdict(machine, "socket", high | 40, 1, 0) == errno.EAFNOSUPPORT
        assert verdict(machine, "socket", high | 2, 1, 0) is None
        assert verdict(machine, "clone", high | 0x10000011) == errno.EPERM
        assert verdict(machine, "personality", high | 0x400000) == errno.EPERM


def test_calls_of_other_architectures_end_the_process(machine: Machine):
    for architecture in (0x40000003, *ARCHITECTURES.values()):
        if architecture != ARCHITECTURES[machine]:
            assert run(filter_program(machine), 1, NOTHING, architecture)[0] == KILLED


@pytest.mark.parametrize("number", [0x40000000, 0x40000000 | 39, 0x40000000 | 250, 0x7FFFFFFF, 0xFFFFFFFE])
def test_calls_of_x32_end_the_process(number: int):
    assert run(filter_program("x86_64"), number, NOTHING, ARCHITECTURES["x86_64"])[0] == KILLED


def test_a_tracer_may_have_a_call_left_out(machine: Machine):
    """It sets the number to -1, upon which the kernel makes none."""
    assert run(filter_program(machine), 0xFFFFFFFF, NOTHING, ARCHITECTURES[machine])[0] == ALLOWED


def values(verdict: Verdict) -> set[int]:
    """Those that a choice names, and their neighbours."""
    if not isinstance(verdict, Choice):
        return set()
    named = {value for each, _ in verdict.cases for value in each}
    deeper = [verdict.otherwise, *(then for _, then in verdict.cases)]
    return {each & 0xFFFFFFFF for value in named for each in (value - 1, value, value + 1)}.union(
        *map(values, deeper)
    )


_NAMED = sorted(set[int]().union(*map(values, CHOICES.values())))
_WORDS = st.one_of(
    st.sampled_from(_NAMED),
    st.sampled_from(_NAMED).map(lambda value: value | 1 << 40),
    st.integers(min_value=0, max_value=(1 << 64) - 1),
)
_ARGUMENTS = st.tuples(*[_WORDS] * 6)


def expected(machine: Machine, number: int, arguments: Arguments) -> int:
    at = MACHINES.index(machine)
    names = [name for name, numbers in NUMBERS.items() if numbers[at] == number]
    assert len(names) <= 1, "two calls of one number"
    return judge(verdict_of(names[0]), arguments) if names else ERRNO | OTHERWISE


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(MACHINES), st.integers(0, 600), _ARGUMENTS)
def test_the_program_is_the_table(machine: Machine, number: int, arguments: Arguments):
    result, _ = run(filter_program(machine), number, arguments, ARCHITECTURES[machine])
    assert result == expected(machine, number, arguments)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(MACHINES), st.sampled_from(sorted(CHOICES)), _ARGUMENTS)
def test_arguments_decide_as_the_table_says(machine: Machine, name: str, arguments: Arguments):
    result, _ = run(filter_program(machine), number_of(machine, name), arguments, ARCHITECTURES[machine])
    assert result == judge(CHOICES[name], arguments)


def test_every_number_ends_as_the_table_says(machine: Machine):
    for number in range(1024):
        result, _ = run(filter_program(machine), number, NOTHING, ARCHITECTURES[machine])
        assert result == expected(machine, number, NOTHING), number


def test_a_call_is_found_in_few_steps(machine: Machine):
    """A list of them all would take a hundred on average."""
    compared = [run(filter_program(machine), each, NOTHING, ARCHITECTURES[machine])[1] for each in range(470)]
    assert max(compared) <= 20
    assert sum(compared) / len(compared) < 12


def test_the_kernel_need_not_run_it_for_calls_that_are_always_allowed(machine: Machine):
    """It tries each number without arguments (seccomp_is_const_allow): loads of the number and the
    architecture, comparisons and `and`, up to a verdict; a load of an argument ends the trial."""
    steps = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    for name, verdict in known_calls().verdicts.items():
        number = NUMBERS[name][MACHINES.index(machine)]
        if verdict == calls.ALLOW and number is not None:
            assert loads(steps, number, ARCHITECTURES[machine]) <= {0, 4}, name


def loads(steps: list[tuple[int, int, int, int]], number: int, architecture: int) -> set[int]:
    """Offsets that are read on the way of a call."""
    found, at, accumulator = set[int](), 0, 0
    while True:
        code, when_true, when_false, operand = steps[at]
        at += 1
        if code == 0x06:
            return found
        if code == 0x20:
            found.add(operand)
            accumulator = {0: number, 4: architecture}.get(operand, 0)
        elif code == 0x05:
            at += operand
        elif code != 0x54:
            at += (
                when_true
                if (accumulator == operand if code == 0x15 else accumulator >= operand)
                else when_false
            )


def test_the_program_fits_the_kernels_limit(machine: Machine):
    assert len(filter_program(machine)) // 8 <= 4096


@pytest.mark.parametrize(
    ("header", "pattern", "at"),
    [
        ("x86_64-linux-gnu/asm/unistd_64.h", r"__NR_(\w+)\s+(\d+)$", 0),
        ("asm-generic/unistd.h", r"__NR(?:3264)?_(\w+)\s+(\d+)$", 1),
    ],
)
def test_numbers_are_the_kernels(header: str, pattern: str, at: int):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"{path} comes with the C library's headers")
    found = re.findall(pattern, path.read_text(), re.MULTILINE)
    known = {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in found}
    compared = [name for name, numbers in NUMBERS.items() if name in known and numbers[at] is not None]
    assert len(compared) > 250
    for name in compared:
        assert NUMBERS[name][at] == known[name], name


def test_an_oci_runtime_gets_the_same_table():
    written = json.loads(json.dumps(oci_seccomp("x86_64")))
    assert (written["defaultAction"], written["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", OTHERWISE)
    for rule in written["syscalls"]:
        indexes = [each["index"] for each in rule.get("args", [])]
        assert len(set(indexes)) == len(indexes)  # a runtime takes one condition an argument
        assert action_of(rule) != ERRNO | OTHERWISE  # and none that says what the default says


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(NUMBERS)), _ARGUMENTS)
def test_of_its_rules_one_at_most_holds_and_it_says_what_the_table_says(name: str, arguments: Arguments):
    found = rules_for(oci_seccomp("x86_64"), name, arguments)
    assert len(found) <= 1
    said = action_of(found[0]) if found else ERRNO | OTHERWISE
    assert said == judge(verdict_of(name), arguments)


@cache
def made_by_the_library() -> bytes:
    lib = library()
    if lib is None:
        pytest.skip("libseccomp is not installed here")
    with tempfile.TemporaryFile() as file:
        return compiled(oci_seccomp(this_machine()), lib, file.fileno())


@settings(deadline=None, max_examples=400)
@given(st.one_of(st.sampled_from(sorted(CHOICES)), st.sampled_from(sorted(NUMBERS))), _ARGUMENTS)
def test_what_a_runtime_makes_of_the_table_is_our_program(name: str, arguments: Arguments):
    """But for names that its library is too old for: they are not there then."""
    machine = this_machine()
    number = NUMBERS[name][MACHINES.index(machine)]
    if number is None:
        return
    theirs, _ = run(made_by_the_library(), number, arguments, ARCHITECTURES[machine])
    ours, _ = run(filter_program(machine), number, arguments, ARCHITECTURES[machine])
    assert theirs == ours or (number > 440 and theirs == ERRNO | OTHERWISE)


def test_beside_a_program_the_table_is_left_out_and_nothing_goes_without_either():
    assert oci_beside_program() == {"defaultAction": "SCMP_ACT_KILL_PROCESS"}


def test_a_table_that_is_not_well_formed_is_named():
    for text in ("[allow]\nread:0", "[allow]\nread:0:63 read:0:63", "[allow]\nread:x:63"):
        with pytest.raises(ValueError, match=r"read|invalid literal"):
            parse(text)
    with pytest.raises(KeyError, match="perhaps"):
        parse("[perhaps]\nread:0:63")


def test_what_arguments_decide_has_its_choices():
    assert known_calls().by_arguments == CHOICES.keys()


def test_a_processor_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError, match="riscv64"):
        this_machine()
