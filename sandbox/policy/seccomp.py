"""Which system calls a sandbox may make: one table for both substrates. Pure.

calls.txt lists what is allowed, and what is refused by name; what is in neither, later kernels' calls too, is
"not there". call_choices.py has those whose arguments decide. A runtime that takes instructions for the
kernel's filter machine (bubblewrap, crun) gets those of seccomp_program.py; another gets the same table by
names, as it is made here.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from sandbox.policy.call_choices import OTHERWISE, Verdict, verdict_of
from sandbox.policy.calls import ALLOW, NUMBERS, Machine, this_machine
from sandbox.policy.seccomp_program import filter_program

__all__ = ["NUMBERS", "Machine", "filter_program", "oci_beside_program", "oci_seccomp", "this_machine"]

_OCI_NAMES: dict[Machine, str] = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_Bits = tuple[int, int]  # a mask, and the value that an argument has in it
_Held = dict[int, _Bits]  # by argument


def oci_beside_program() -> dict[str, Any]:
    """`linux.seccomp` for a runtime that takes the instructions from elsewhere. One that does not ends all
    that it runs: nothing goes without the table."""
    return {"defaultAction": "SCMP_ACT_KILL_PROCESS"}


@cache
def oci_seccomp(machine: Machine) -> dict[str, Any]:
    """The table as `linux.seccomp` of config.json; not to be changed by the caller. Calls of other
    architectures end the caller."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": OTHERWISE,
        "architectures": [_OCI_NAMES[machine]],
        "syscalls": list(_rules()),
    }


def _rules() -> Iterator[dict[str, Any]]:
    """They exclude each other, so that their order says nothing; none says what the default does."""
    plain: dict[int, list[str]] = {}
    for name in NUMBERS:
        verdict = verdict_of(name)
        if isinstance(verdict, int):
            plain.setdefault(verdict, []).append(name)
            continue
        for held, then in _ways(verdict, {}):
            yield {"names": [name], **_action(then), "args": [_argument(*each) for each in held.items()]}
    yield from ({"names": names, **_action(then)} for then, names in plain.items() if then != OTHERWISE)


def _action(verdict: int) -> dict[str, Any]:
    if verdict == ALLOW:
        return {"action": "SCMP_ACT_ALLOW"}
    return {"action": "SCMP_ACT_ERRNO", "errnoRet": verdict}


def _argument(index: int, bits: _Bits) -> dict[str, Any]:
    return {"index": index, "value": bits[0], "valueTwo": bits[1], "op": "SCMP_CMP_MASKED_EQ"}


def _ways(verdict: Verdict, held: _Held) -> Iterator[tuple[_Held, int]]:
    """All ways to an end, each with what it asks of the arguments: one condition an argument."""
    if isinstance(verdict, int):
        yield held, verdict
        return
    cases = verdict.by_value()
    ways = [((verdict.mask, value), then) for value, then in cases.items()]
    ways += [(bits, verdict.otherwise) for bits in _others(_single_bits(verdict.mask), list(cases), (0, 0))]
    for bits, then in ways:
        both = _both(held.get(verdict.argument, (0, 0)), bits)
        if both is not None:
            yield from _ways(then, {**held, verdict.argument: both})


def _others(bits: list[int], values: list[int], held: _Bits) -> Iterator[_Bits]:
    """All numbers of these bits but `values`: as few leading bits of each as tell it from them."""
    if not values:
        yield held
    elif bits:
        for chosen in (bits[0], 0):
            alike = [each for each in values if each & bits[0] == chosen]
            yield from _others(bits[1:], alike, (held[0] | bits[0], held[1] | chosen))


def _single_bits(mask: int) -> list[int]:
    return [1 << place for place in reversed(range(32)) if mask >> place & 1]


def _both(first: _Bits, second: _Bits) -> _Bits | None:
    """None where no argument can be both."""
    if (first[1] ^ second[1]) & first[0] & second[0]:
        return None
    return first[0] | second[0], first[1] | second[1]
