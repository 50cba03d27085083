"""Resource abuse: a sandbox takes as much as it can of something. What holds it is a limit, and with a wider
limit the same attempt gets it all."""

import os
import time
import tracemalloc
from pathlib import Path

from bench.attack_cases.arena import Arena
from bench.attack_cases.model import Box, Case, Deed, Instead, Outside, Probe, Raised, Seen, Shown
from bench.attack_cases.programs import command, judge
from sandbox import Policy, Sandbox, cgroups
from sandbox.helper import hierarchies_of
from sandbox.journal import Journal
from sandbox.places import default_state_dir

KIB, MIB = 1 << 10, 1 << 20
CAP_BYTES = 64 * KIB
NAMES_MB, NUM_NAMES = 24, 60_000
MANY = 12  # processes beside one
_Limit = tuple[frozenset[str], str]  # what it says, and its name
_BY_MEMORY: _Limit = (frozenset({"oom"}), "memory limit")
_BY_PIDS: _Limit = (frozenset({"EAGAIN"}), "pids limit")
_FULL = frozenset({"ENOSPC"})
_BYTES = b"\0\xff\xfe\x1b[2J\x1b]0;x\x07\r\n\xc3("
_FEW = Box(pids=40, alone=True)
_SMALL = Box(memory_mb=64, disk_mb=400, alone=True)
_ROOMY = Box(memory_mb=512, disk_mb=400, alone=True)
_PATIENT = Policy(timeout_s=60.0, output_bytes=CAP_BYTES, output_total_bytes=4096 * MIB)


def needs_cgroups() -> str:
    """Why limits on processes, memory and CPU cannot be tried; empty where they can."""
    lacking = {"memory", "pids", "cpu"} - cgroups.enforceable(hierarchies_of(default_state_dir()))
    return f"no cgroup limits {' and '.join(sorted(lacking))} here" if lacking else ""


def _takes(function: str, *arguments: str, box: Box | None = None, timeout_s: float = 60.0) -> Probe:
    return Probe("takes", function, arguments, box or Box(), timeout_s)


def _long_line(kilobytes: int, cap_bytes: int) -> Deed:
    """Prints one line; open where more than the cap is kept, or is held in this process meanwhile."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(policy=_PATIENT)) as box:
            tracemalloc.start()
            try:
                words = command(_takes("say", str(kilobytes)))
                result = box.commands.run(words, output_bytes=cap_bytes, timeout_s=120)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        kept = len(result.stdout_bytes)
        if kept > 2 * CAP_BYTES:
            return Seen(True, f"{kept >> 10} KiB were kept, {peak >> 10} KiB held")
        if result.reason != "exit" or peak > 16 * MIB:
            return Seen(False, f"{result.reason}, {peak >> 10} KiB held")
        return Seen(False, "head and tail kept" if result.truncated else "all kept")

    return deed


def _some_output(arena: Arena) -> Seen:
    return arena.inside(_takes("say", "4096", box=_output(64 * MIB)))


def _strange_bytes(arena: Arena) -> Seen:
    """Open where they arrive changed, or cannot be shown."""
    with arena.sandbox(Box()) as box:
        result = box.commands.run(command(_takes("say_bytes", _BYTES.hex())))
    same = result.stdout_bytes == _BYTES and len(result.stdout) > 0
    return Seen(not same, "arrived as they were" if same else f"{result.stdout_bytes!r}")


def _strict_text(arena: Arena) -> Seen:
    del arena
    try:
        return Seen(False, _BYTES.decode())
    except UnicodeDecodeError as error:
        return Seen(True, f"UnicodeDecodeError: {error.reason}")


def _sparse_download(max_bytes: int) -> Deed:
    """A file of many zeros that take no room until somebody reads them."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(alone=True)) as box:
            box.commands.run(f"truncate -s {8 * MIB if max_bytes > MIB else 1 << 40} sparse")
            return Seen(True, f"{len(box.files.read('sparse', max_bytes=max_bytes))} bytes arrived")

    return deed


def _remembered_names(memory_mb: int, count: int) -> Deed:
    """Open where the kernel held more for the sandbox than its memory limit of the first deed."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(memory_mb=memory_mb, alone=True)) as box:
            seen = arena.try_in(box, _takes("names", "/workspace", str(count)))
            peak = _peak_bytes(arena, box)
        more = peak > NAMES_MB * MIB
        return Seen(more, f"{peak >> 20} MiB at most" if more else seen.said)

    return deed


def _burn(cpu: float) -> Deed:
    """Open where nobody held the sandbox back."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(cpu=cpu, alone=True)) as box:
            seen = arena.try_in(box, _takes("processor", "0.5", "2"))
            group = _group(arena, box, "cpu")
            lines = (group / "cpu.stat").read_text().splitlines()
        throttled = next(int(line.split()[1]) for line in lines if line.startswith("nr_throttled"))
        return Seen(throttled == 0, "throttled" if throttled and seen.said == "burnt" else "never throttled")

    return deed


def _beside(*, together: bool) -> Deed:
    """One process beside MANY of another sandbox, or of its own, all on one processor. Open where they leave
    it little more than its part of them all; how much each has is counted, so other work of the machine does
    not matter."""

    def deed(arena: Arena) -> Seen:
        processor = str(min(os.sched_getaffinity(0)))
        with arena.sandbox(Box(alone=True)) as one, arena.sandbox(Box(alone=True)) as other:
            starts = time.monotonic() + 1.0
            times = (processor, str(starts), str(starts + 2.0))
            crowd = (one if together else other).commands.start(command(_takes("share", str(MANY), *times)))
            seen = arena.try_in(one, _takes("share", "1", *times))
            theirs = judge(crowd.wait())
        share = float(seen.said) / (float(seen.said) + float(theirs.said))
        if share < 2 / (MANY + 1):
            return Seen(True, "it had a part like each of them")
        return Seen(False, "it had a sandbox's part" if share > 0.33 else f"it had {share:.0%}")

    return deed


def _write_to_disk(arena: Arena) -> Seen:
    return arena.outside(_takes("disk_writes", str(arena.disk), "4"), "user", disk=True)


def _stuck(arena: Arena) -> tuple[str, str]:
    """Ends a command while its process waits in the kernel: the reason, and the process's state before."""
    with arena.sandbox(Box(alone=True)) as box:
        running = box.commands.start(command(_takes("wait_uninterruptibly", "/workspace/state")))
        box.commands.run("until [ -s state ]; do sleep 0.01; done")
        state = box.files.read("state").decode()
        running.kill()
        return running.wait(30).reason, state


def _end_stuck(arena: Arena) -> Seen:
    reason, _ = _stuck(arena)
    return Seen(reason != "killed", reason)


def _is_stuck(arena: Arena) -> Seen:
    _, state = _stuck(arena)
    return Seen(state == "D", f"it was in state {state}")


def _kill(target: str) -> Deed:
    """Signals that end or stop a process. Open where the target is gone, or answers no more."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(alone=True)) as box:
            other = box.commands.start("echo $$ > other; exec sleep 60", timeout_s=60)
            signals = "; ".join(f"kill -{name} {target}" for name in ("STOP", "TERM", "KILL"))
            box.commands.run(f"until [ -s other ]; do sleep 0.01; done; {signals}")
            if target == "1":
                return Seen(not box.commands.run("true").ok, "it lives on")
            reason = other.wait(30).reason
            return Seen(reason == "signal", f"the other command ended by {reason}")

    return deed


def _orphans(arena: Arena) -> Seen:
    return arena.inside(_takes("zombies", "100", "orphans", box=_FEW))


def _unreaped(arena: Arena) -> Seen:
    seen = arena.inside(_takes("zombies", "100", "own", box=_FEW))
    return Seen(seen.said == "EAGAIN", f"the dead count: {seen.said}")


def _kill_all(arena: Arena) -> Seen:
    """Open where it ends more than the processes of its own sandbox."""
    with arena.sandbox(Box(alone=True)) as box:
        result = box.commands.run(command(_takes("kill_everything")))
        alive = box.commands.run("true").ok
    return Seen(not alive, f"the sandbox lives on, the command ended by {result.reason}")


def _kill_own(arena: Arena) -> Seen:
    with arena.sandbox(Box(alone=True)) as box:
        other = box.commands.start("sleep 60", timeout_s=60)
        box.commands.run(command(_takes("kill_everything")))
        reason = other.wait(30).reason
    return Seen(reason == "signal", f"another command of the same sandbox ended by {reason}")


def _small_commands(count: int) -> Deed:
    """Open where a descriptor of init's or a process stays of commands that have ended."""

    def deed(arena: Arena) -> Seen:
        with arena.sandbox(Box(alone=True)) as box:
            box.commands.run("true")
            before = _left_over(arena, box)
            for _ in range(count):
                box.commands.run(["/usr/bin/true"])
            after = _left_over(arena, box)
        return Seen(after != before, "nothing more" if after == before else f"{before}, then {after}")

    return deed


def _running_commands(arena: Arena) -> Seen:
    with arena.sandbox(Box(alone=True)) as box:
        box.commands.run("true")
        before = _held(arena, box)
        running = [box.commands.start("echo up > up$$; sleep 60") for _ in range(3)]
        box.commands.run("until [ $(ls up* | wc -l) = 3 ]; do sleep 0.01; done")
        during = _held(arena, box)
        for each in running:
            each.kill()
            each.wait(30)
    return Seen(during > before, f"{during - before} processes more while three commands run")


def _group(arena: Arena, box: Sandbox, controller: cgroups.Controller) -> Path:
    groups = cgroups.plan_groups(hierarchies_of(arena.state_dir), cgroups.state_key(arena.state_dir), box.id)
    return next(each.path for each in groups if controller in each.hierarchy.controllers)


def _peak_bytes(arena: Arena, box: Sandbox) -> int:
    group = _group(arena, box, "memory")
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / name).read_text()) for name in names if (group / name).exists())


def _left_over(arena: Arena, box: Sandbox) -> int:
    """The least that init held within a moment: a minder ends after its report."""
    found = list[int]()
    while len(found) < 50:
        found.append(_held(arena, box))
        time.sleep(0.01)
    return min(found)


def _held(arena: Arena, box: Sandbox) -> int:
    """Descriptors and children of init, dead ones that it has not taken in counted."""
    record = next(each for each in Journal(arena.state_dir).records() if each.id == box.id)
    init = record.processes[-1].pid
    processes = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
    return len(list(Path(f"/proc/{init}/fd").iterdir())) + sum(_parent(each) == init for each in processes)


def _hidden() -> str:
    return "" if os.geteuid() == 0 else "only root can see what init holds"


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # gone meanwhile
        return None


def _limited(number: int, name: str, title: str, attack: Probe, *, by: _Limit, wider: Box) -> Case:
    shut, limit = by
    return Case(number, name, title, attack, shut, limit, Raised(wider), "contained", needs=needs_cgroups)


def _output(total_bytes: int) -> Box:
    return Box(policy=Policy(output_bytes=CAP_BYTES, output_total_bytes=total_bytes))


CASES: tuple[Case, ...] = (
    _limited(36, "processes", "a hundred processes", _takes("processes", "100", box=_FEW), by=_BY_PIDS,
             wider=Box(pids=200, alone=True)),
    _limited(37, "threads", "a hundred threads", _takes("threads", "100", box=_FEW), by=_BY_PIDS,
             wider=Box(pids=200, alone=True)),
    _limited(38, "memory", "200 MiB of memory", _takes("memory", "200", box=_SMALL), by=_BY_MEMORY,
             wider=_ROOMY),
    _limited(38, "memory-in-files", "200 MiB of memory, as a file",
             _takes("bytes_in", "/workspace", "200", box=_SMALL), by=_BY_MEMORY, wider=_ROOMY),
    _limited(38, "memory-in-segments", "200 MiB of memory, as a System V segment",
             _takes("shared_memory", "200", box=_SMALL), by=_BY_MEMORY, wider=_ROOMY),
    Case(38, "dev-shm", "100 MiB in /dev/shm", _takes("bytes_in", "/dev/shm", "100", box=_ROOMY), _FULL,
         "size of /dev/shm", Instead(("/workspace", "100"), "in the same sandbox, in /workspace"),
         "contained",
         needs=needs_cgroups),
    Case(40, "output", "1 GiB of output", _takes("say", str(MIB), box=_output(MIB)),
         frozenset({"output_limit"}), "output limit", Shown(_some_output, "4 MiB, with a limit of 64 MiB"),
         "contained"),
    Case(41, "long-line", "16 MiB on one line", _long_line(16 * KIB, CAP_BYTES),
         frozenset({"head and tail kept"}),
         "output cap", Shown(_long_line(16 * KIB, 32 * MIB), "with a cap of 32 MiB"), "contained"),
    Case(41, "very-long-line", "1 GiB on one line", _long_line(MIB, CAP_BYTES),
         frozenset({"head and tail kept"}),
         "output cap", Shown(_long_line(16 * KIB, 32 * MIB), "with a cap of 32 MiB and 16 MiB of output"),
         "contained", soak=True),
    Case(42, "strange-bytes", "NUL, invalid UTF-8 and orders to a terminal as output", _strange_bytes,
         frozenset({"arrived as they were"}), "output is bytes; its text form replaces what is none",
         Shown(_strict_text, "the same bytes, taken for text"), "contained"),
    Case(43, "disk", "32 MiB of files", _takes("bytes_in", "/workspace", "32", box=Box(disk_mb=8)), _FULL,
         "disk limit", Raised(Box(disk_mb=64)), "contained"),
    Case(44, "inodes", "3,000 empty files", _takes("files_in", "/workspace", "3000", box=Box(disk_mb=8)),
         _FULL,
         "disk limit, in inodes", Raised(Box(disk_mb=64)), "contained"),
    Case(46, "sparse-file", "a sparse file of a tebibyte, downloaded", _sparse_download(MIB),
         frozenset({"FileTooLarge"}), "the download's own bound",
         Shown(_sparse_download(16 * MIB), "a smaller one, with a wider bound"), "contained"),
    Case(47, "sockets", "1,100 sockets", _takes("sockets", "1100"), frozenset({"EMFILE"}),
         "limit on open files (1,024)", Outside("user"), "contained"),
    Case(49, "names", "names that are not there, for the kernel to remember",
         _remembered_names(NAMES_MB, NUM_NAMES),
         frozenset({"looked for them", "oom"}), "memory limit",
         Shown(_remembered_names(512, NUM_NAMES), "with memory_mb=512"), "contained", needs=needs_cgroups),
    Case(51, "processor", "two processors", _burn(0.05), frozenset({"throttled"}), "cpu limit",
         Shown(_burn(64), "with cpu=64"), "contained", needs=needs_cgroups),
    Case(51, "beside-many", f"{MANY} processes that burn a processor, beside one of another sandbox on it",
         _beside(together=False), frozenset({"it had a sandbox's part"}), "equal weights of cpu cgroups",
         Shown(_beside(together=True), "with all of them in one sandbox"), "contained", needs=needs_cgroups),
    Case(52, "disk-writes", "writes that wait for a disk", _takes("disk_writes", "/workspace", "4"),
         frozenset({"nothing was written to a disk"}), "the writable layer is memory",
         Shown(_write_to_disk, "outside, as an ordinary user"), "contained"),
    Case(53, "uninterruptible", "a command that waits in the kernel when it is killed", _end_stuck,
         frozenset({"killed"}), "the minder ends every process of a command",
         Shown(_is_stuck, "the same, looked at from beside it"), "contained"),
    Case(55, "kill-init", "pid 1 stopped and killed", _kill("1"), frozenset({"it lives on"}),
         "a pid namespace's first process takes no such signal from inside",
         Shown(_kill("$(cat other)"), "in the same sandbox, another command"), "contained"),
    Case(56, "zombies", "100 orphans that die, in a sandbox of 40 processes", _orphans,
         frozenset({"100 came and went"}), "the minder takes orphans in",
         Shown(_unreaped, "children that nobody waits for"), "contained", needs=needs_cgroups),
    Case(57, "kill-all", "kill -9 -1", _kill_all,
         frozenset({"the sandbox lives on, the command ended by signal"}), "pid namespace",
         Shown(_kill_own, "within the sandbox"), "contained"),
    Case(59, "small-commands", "40 commands that do nothing", _small_commands(40),
         frozenset({"nothing more"}),
         "init holds nothing of a command, and takes its minder in",
         Shown(_running_commands, "commands that have not ended"), "contained", needs=_hidden),
    Case(59, "many-small-commands", "10,000 commands that do nothing", _small_commands(10_000),
         frozenset({"nothing more"}), "init holds nothing of a command, and takes its minder in",
         Shown(_running_commands, "commands that have not ended"), "contained", needs=_hidden, soak=True),
)  # fmt: skip
