"""One case on one substrate: the attack, then its positive control."""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

from bench.attack_cases.arena import Arena, attempt, without
from bench.attack_cases.model import (
    Absent,
    Apart,
    Box,
    Case,
    Identity,
    Instead,
    NoControl,
    Outside,
    Positive,
    Probe,
    Raised,
    Seen,
    Shown,
    Substrate,
    Unguarded,
    Without,
)
from bench.attack_cases.neighbour import Harmed, Slowed
from sandbox.guard.node import shared_guard
from sandbox.policy import Protection, apparmor_profiles
from sandbox.policy.seccomp import filter_program, this_machine

Outcome = Literal["denied", "contained", "open", "failed", "not here"]
FAULTS: frozenset[Outcome] = frozenset({"open", "failed"})
_NOT_TRIED = "no control: not tried"
_OUTSIDE: dict[Identity, str] = {
    "user": "outside, as an ordinary user",
    "root": "outside, as root",
    "namespace": "outside, with every capability in namespaces of its own",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case came to. `shown`: the control succeeded, so the attempt was a real one. failed: neither
    open nor shut as expected, or a control that found the door shut too."""

    case: str
    title: str
    substrate: Substrate | Literal["-"]
    outcome: Outcome
    said: str
    mechanism: str
    control: str
    shown: bool


def run_case(case: Case, arena: Arena) -> Finding:
    """Seconds at most. Open where the door was, once. Failed where it was shut and the neighbour was not well
    meanwhile, or is not afterwards: the next case has another one."""
    arena.mind_neighbour()
    try:
        try:
            return _run(case, arena)
        except Slowed:  # by a pause of the whole machine as well, but not twice
            return _run(case, arena)
    except Harmed as error:
        return _finding(case, arena, "failed", str(error), _NOT_TRIED)


def _run(case: Case, arena: Arena) -> Finding:
    if (reason := case.needs() if case.needs is not None else "") != "":
        return _finding(case, arena, "not here", reason, _NOT_TRIED)
    try:
        seen = _attempted(case, arena)
    except Unguarded as error:  # what is tried takes something of the host's
        return _finding(case, arena, "not here", str(error), _NOT_TRIED)
    if seen.opened or seen.said not in case.shut:
        return _finding(case, arena, "open" if seen.opened else "failed", seen.said, _NOT_TRIED)
    return _shown_by_control(case, arena, seen.said)


def _attempted(case: Case, arena: Arena) -> Seen:
    """Raises what the neighbour came to where the door was shut: an open one is open, whatever that was."""
    seen = Seen(False, "")
    try:
        with arena.beside.at_work():
            seen = attempt(case.attack, arena)
    except Harmed as error:
        if not seen.opened:
            raise
        return Seen(True, f"{seen.said}; {error}")
    return seen


def _shown_by_control(case: Case, arena: Arena, said: str) -> Finding:
    if isinstance(case.control, NoControl):
        return _finding(case, arena, case.effect, said, f"no control: {case.control.reason}")
    try:
        control = _control(case, case.control, arena)
    except Unguarded as error:
        return _finding(case, arena, case.effect, said, f"no control: {error}")
    arena.beside.check()
    if control.said == "ENOSYS":
        words = f"no control: {_words(case)}, this kernel does not have it"
        return _finding(case, arena, case.effect, said, words)
    if not control.opened:
        return _finding(case, arena, "failed", said, f"{_words(case)} found it shut too: {control.said}")
    return _finding(case, arena, case.effect, said, f"{_words(case)}: {control.said}", shown=True)


def not_tried(absent: Absent) -> Finding:
    """The finding of a case that cannot be expressed."""
    words = "no control: not tried"
    return Finding(
        f"{absent.number:02}", absent.title, "-", "not here", absent.reason, "", words, shown=False
    )


def _control(case: Case, control: Positive, arena: Arena) -> Seen:
    match control:
        case Without(protections):
            return _without(_probe(case), protections, case.shut, arena)
        case Raised(box):
            return attempt(replace(_probe(case), box=box), arena)
        case Outside(identity, arguments):
            probe = _probe(case)
            return arena.outside(replace(probe, arguments=arguments or probe.arguments), identity)
        case Instead(arguments):
            return attempt(replace(_probe(case), arguments=arguments), arena)
        case Shown(deed):
            return attempt(deed, arena)
        case Apart():
            return _apart(case, control, arena)
        case _ as never:
            assert_never(never)


def _without(probe: Probe, protections: frozenset[Protection], shut: frozenset[str], arena: Arena) -> Seen:
    """Where several protections hold a door, each of them does alone. Where the kernel has AppArmor or takes
    the node's guard, which hold much of what they do, the control goes without these too."""
    for each in protections if len(protections) > 1 else ():
        alone = attempt(without(probe, frozenset({each})), arena)
        if alone.opened or alone.said not in shut:
            return Seen(False, f"{alone.said} without {each} alone")
    return attempt(without(probe, protections | _behind()), arena)


def _apart(case: Case, control: Apart, arena: Arena) -> Seen:
    """Open where each of the two has been shown to hold it, and neither does where it opens. AppArmor, where
    the kernel has it, is among the rest and has its own word."""
    probe = _probe(case)
    also = control.also | {"EACCES"} if "apparmor" in _behind() else control.also
    rest = attempt(without(probe, frozenset({"seccomp"})), arena)
    if rest.said == "ENOSYS":
        return rest
    if rest.opened or rest.said not in case.shut | also:
        return Seen(False, f"{rest.said} without seccomp alone")
    outer = replace(probe, arguments=control.arguments or probe.arguments)
    table = arena.outside(outer, control.identity, confined=filter_program(this_machine()))
    if table.opened or table.said not in case.shut:
        return Seen(False, f"{table.said} by seccomp alone")
    return arena.outside(outer, control.identity)


def _behind() -> frozenset[Protection]:
    there: dict[Protection, bool] = {
        "apparmor": apparmor_profiles.is_available(),
        "guard": shared_guard() is not None,
    }
    return frozenset(name for name, is_there in there.items() if is_there)


def _probe(case: Case) -> Probe:
    assert isinstance(case.attack, Probe), f"{case.key}: this kind of control repeats a probe"
    return case.attack


def _words(case: Case) -> str:
    match case.control:
        case Without(protections):
            return f"without {' and '.join(sorted(protections | _behind()))}"
        case Raised(box):
            return f"with {_limits(box)}"
        case Outside(identity):
            return _OUTSIDE[identity]
        case Apart(identity):
            return f"{_OUTSIDE[identity]}, and shut by seccomp alone and by the rest alone"
        case Instead(_, what) | Shown(_, what):
            return what
        case NoControl(reason):
            return reason


def _limits(box: Box) -> str:
    if box.policy.network != "none":
        return "one rule more"
    named = {name: getattr(box, name) for name in ("pids", "memory_mb", "disk_mb", "cpu")}
    given = [f"{name}={value}" for name, value in named.items() if value is not None]
    return ", ".join(given) or "a wider limit"


def _finding(
    case: Case, arena: Arena, outcome: Outcome, said: str, control: str, *, shown: bool = False
) -> Finding:
    return Finding(case.key, case.title, arena.substrate, outcome, said, case.mechanism, control, shown)
