import asyncio

import pytest

from protocol.clock import SystemClock
from protocol.events import Edge
from teams.desk import Desk
from teams.events import EventLog
from teams.recorder import Recorder


class Queue:
    """A desk, and agents that use it one after the other, each until it is let go."""

    def __init__(self):
        self.desk = Desk()
        self.log = EventLog("run-test")
        self.order = []

    async def use(self, agent, release):
        async with self.desk.use(Recorder(agent, self.log, SystemClock()), "run"):
            self.order.append(agent)
            await release.wait()

    def queues(self):
        return [i for i in self.log.intervals if i.kind == "tool.queue"]

    def use_of(self, agent):
        return next(i.id for i in self.log.intervals if (i.agent, i.kind) == (agent, "tool.run"))


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def test_each_waits_for_the_one_before_and_the_log_says_so():
    async def main():
        scene = Queue()
        release = asyncio.Event()
        tasks = []
        for agent in ("ada", "bo", "cy"):
            tasks.append(asyncio.create_task(scene.use(agent, release)))
            await settled()
        assert scene.order == ["ada"]
        release.set()
        await asyncio.gather(*tasks)
        return scene

    scene = asyncio.run(main())
    assert scene.order == ["ada", "bo", "cy"]
    bo, cy = scene.queues()
    assert (bo.agent, cy.agent) == ("bo", "cy")
    assert set(scene.log.edges) == {
        Edge("unblock", scene.use_of("ada"), bo.id),
        Edge("unblock", scene.use_of("bo"), cy.id),
    }


def test_one_who_comes_while_the_desk_passes_to_another_queues_behind_it():
    async def main():
        scene = Queue()
        first, rest = asyncio.Event(), asyncio.Event()
        ada = asyncio.create_task(scene.use("ada", first))
        await settled()
        bo = asyncio.create_task(scene.use("bo", rest))
        await settled()
        first.set()
        await ada  # bo is woken and has not run yet
        cy = asyncio.create_task(scene.use("cy", rest))
        await settled()
        assert scene.order == ["ada", "bo"]
        rest.set()
        await asyncio.gather(bo, cy)
        return scene

    scene = asyncio.run(main())
    assert Edge("unblock", scene.use_of("bo"), scene.queues()[1].id) in scene.log.edges


def test_one_who_is_cancelled_in_the_queue_leaves_it():
    async def main():
        scene = Queue()
        release = asyncio.Event()
        ada = asyncio.create_task(scene.use("ada", release))
        await settled()
        bo = asyncio.create_task(scene.use("bo", release))
        await settled()
        bo.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bo
        release.set()
        await ada
        await scene.use("cy", release)
        return scene

    scene = asyncio.run(main())
    assert scene.order == ["ada", "cy"]
    (queue,) = scene.queues()
    assert (queue.agent, queue.attributes["ended_by"]) == ("bo", "CancelledError")
    assert not scene.log.edges
