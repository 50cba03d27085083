"""Many sandboxes of every fate, some side by side: nothing of them may stay."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from sandbox_places import assert_no_more_fds, count_fds
from soak_results import keep, resident_mib

from sandbox import AsyncSandbox
from sandbox.audit import check_integrity

SIDE_BY_SIDE = 4
MAX_GROWTH_MIB = 16.0
SOAK = pytest.param(1_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])
SUBSTRATES = ("function", "container") if os.geteuid() == 0 else ("function",)


@pytest.mark.parametrize("count", [pytest.param(16, id="short"), SOAK])
def test_sandboxes_of_every_fate_leave_nothing_behind(state_dir: Path, toolkit: Path, count: int):
    num_fds = count_fds()
    fates = asyncio.run(_run(range(count // 4), state_dir, toolkit))
    before_mib = resident_mib()
    fates += asyncio.run(_run(range(count // 4, count), state_dir, toolkit))
    growth_mib = resident_mib() - before_mib
    audit = check_integrity(state_dir)
    assert (audit.leftovers, audit.live) == ((), ())
    assert_no_more_fds(num_fds)
    assert fates.total() == count
    if count > 500:
        assert len(fates) == len(FATES) * len(SUBSTRATES), f"not every fate took place: {fates}"
        assert growth_mib < MAX_GROWTH_MIB
        keep("sandboxes", {"sandboxes": count, "fates": dict(fates), "growth_mib": round(growth_mib, 1)})


async def _run(numbers: range, state_dir: Path, toolkit: Path) -> Counter[str]:
    fates: Counter[str] = Counter()
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            chance = random.Random(number)
            substrate, fate = chance.choice(SUBSTRATES), FATES[chance.randrange(len(FATES))]
            box = await AsyncSandbox.create(substrate=substrate, state_dir=state_dir, toolkit=toolkit)
            try:
                await fate(box)
            finally:
                await box.kill()
            fates[f"{substrate}: {fate.__name__}"] += 1

    await asyncio.gather(*(worker() for _ in range(SIDE_BY_SIDE)))
    return fates


async def works(box: AsyncSandbox) -> None:
    await box.files.write("/workspace/in.txt", b"1 2 3")
    result = await box.commands.run("wc -w < in.txt")
    assert result.stdout.strip() == "3"


async def runs_out_of_time(box: AsyncSandbox) -> None:
    assert (await box.commands.run("sleep 1000", timeout_s=0.2)).reason == "timeout"


async def leaves_a_daemon(box: AsyncSandbox) -> None:
    await box.commands.run("setsid sleep 1000 >/dev/null 2>&1 < /dev/null &")


async def prints_too_much(box: AsyncSandbox) -> None:
    assert (await box.commands.run("yes | head -c 20000000")).truncated


async def is_killed_at_work(box: AsyncSandbox) -> None:
    command = asyncio.create_task(box.commands.run("sleep 1000"))
    await asyncio.sleep(0.05)
    await box.kill()
    await asyncio.wait([command])
    command.exception()


FATES = (works, runs_out_of_time, leaves_a_daemon, prints_too_much, is_killed_at_work)
