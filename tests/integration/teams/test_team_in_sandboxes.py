"""The team runtime and the samplers in real sandboxes."""

import asyncio

import pytest
from forced_model import ForcedModel

from evals import team_humaneval
from evals.humaneval_config import SandboxSettings
from evals.problems import load_problems
from evals.sandboxes import fresh_sandbox
from teams.dag import Dag
from teams.harness.sampler import SamplerLimits
from teams.harness.task import RunOptions, TeamTask, run_program
from teams.member import Ending
from teams.team import TeamLimits
from teams.workspace import Tree

(PROBLEM,) = load_problems(limit=1)
RIGHT = f"```python\n{PROBLEM.prompt}{PROBLEM.canonical_solution}```"
WRONG = f"```python\n{PROBLEM.prompt}    return True\n```"


def test_an_agents_box_holds_the_workspace_and_no_network(boxes):
    async def scene():
        box = await boxes("ada", Tree({"a/b.txt": b"hello\n"}))
        try:
            assert (await box.run("cat a/b.txt", timeout_s=10)).output == "hello\n"
            assert (await box.run("exit 3", timeout_s=10)).exit_code == 3
            assert (await box.run("sleep 60", timeout_s=0.2)).reason == "timeout"
            reach = "python3 -c \"import socket; socket.create_connection(('192.0.2.1', 80), 2)\""
            assert (await box.run(reach, timeout_s=10)).exit_code == 1
            await box.write("new.txt", b"x")
            await box.remove("a/b.txt")
            await box.remove("a/b.txt")
            await box.run("ln -s /etc/passwd leak; mkfifo pipe", timeout_s=10)
            tree = await box.snapshot()
            assert tree.files == {"new.txt": b"x"}
            assert sorted(tree.irregular) == ["leak", "pipe"]
            assert await box.read("nothing") is None
        finally:
            await box.kill()

    asyncio.run(scene())


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
@pytest.mark.parametrize("substrate", ["container"], indirect=True)
def test_a_team_that_is_ended_leaves_no_process(boxes, end):
    async def sleeper(member):
        await member.run("sleep 300", timeout_s=300)
        return Ending("done")

    async def lead(member):
        for name in ("ada", "bo"):
            member.spawn(name, sleeper, "sleep")
        await member.run("sleep 300", timeout_s=300)
        return Ending("done")

    async def scene():
        task = TeamTask("toy", "sleep", Tree({}), boxes)
        limits = TeamLimits(deadline_s=1.0 if end == "deadline" else 60.0)
        running = asyncio.create_task(
            run_program(task, lead, lambda agent: ForcedModel(), RunOptions(limits=limits))
        )
        if end == "deadline":
            result, _ = await running
            assert result.ended == "deadline"
            return
        await asyncio.wait([running], timeout=1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scene())  # the fixture checks what is left


@pytest.mark.parametrize("substrate", ["function"], indirect=True)
def test_samplers_solve_a_humaneval_problem(boxes, tmp_path, toolkit):
    execute = fresh_sandbox(SandboxSettings(), state_dir=tmp_path / "state", toolkit=toolkit)

    def attempt(answer):
        return asyncio.run(
            team_humaneval.run(
                PROBLEM,
                models=lambda agent: ForcedModel(answer, seconds=0.01),
                sandboxes=boxes,
                execute=execute,
                limits=SamplerLimits(samples=2),
            )
        )

    solved = attempt(lambda seed: RIGHT if seed == 5 else WRONG)
    assert solved.result.solved, solved.result
    assert not solved.replay
    assert Dag(solved.events).attribution().untraced_share <= 0.01
    assert {"lead", "sampler-2"} <= {part.agent for part in Dag(solved.events).critical_path().segments}
    unsolved = attempt(lambda seed: WRONG)
    assert not unsolved.result.solved
    assert unsolved.result.verdict.detail == "the diff holds no solution.py"
