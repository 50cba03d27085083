"""How a team's run ends: submitted, bounded, given up, cancelled, or by a fault."""

import asyncio

import pytest
from team_doubles import OpenBox, ScriptedModel, action
from team_scene import Scene, nothing_left, until

from protocol.errors import DockyardError
from sandbox.errors import CapacityError
from teams.agent import AgentLimits, chat_program
from teams.member import Ending
from teams.model_client import ModelError
from teams.team import TeamLimits

__all__ = ["nothing_left"]  # a fixture


def test_an_agent_that_never_acts_is_given_up():
    scene = Scene({"lead": ["hm"] * 9})
    result = scene.run(max_malformed=3)
    assert result.ended == "gave up"
    assert len(result.transcript) == 3


def test_turns_are_bounded():
    scene = Scene({"lead": [action(do="run", cmd="true")] * 9})
    assert scene.run(max_turns=4).ended == "out of turns"


def test_teammates_end_when_the_lead_submits(nothing_left, tmp_path):
    at_work = tmp_path / "at-work"
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="x"),
                action(do="run", cmd=until(at_work)),
                action(do="submit"),
            ],
            "ada": [action(do="run", cmd=f"touch {at_work}; sleep 60")],
        }
    )
    nothing_left(scene)
    result = scene.run()
    assert {o.name: o.state for o in result.outcomes} == {"lead": "done", "ada": "cancelled"}
    (cut,) = scene.intervals("ada", "tool.run")
    assert cut.attributes["ended_by"] == "CancelledError"


def test_the_deadline_ends_everything_and_keeps_what_the_lead_has_changed(nothing_left):
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="x"),
                action(do="run", cmd="echo 'x = 2' > app.py; sleep 60"),
            ],
            "ada": [action(do="run", cmd="sleep 60")],
        },
        limits=TeamLimits(deadline_s=0.5),
    )
    nothing_left(scene)
    result = scene.run()
    assert result.ended == "deadline"
    assert result.verdict is None
    assert not result.solved
    assert scene.graded == []
    assert result.diff.changed == {"app.py": b"x = 2\n"}
    assert {o.name: (o.state, bool(o.diff)) for o in result.outcomes} == {
        "lead": ("cancelled", True),
        "ada": ("cancelled", False),
    }


def test_a_deadline_without_a_readable_workspace_hands_in_nothing(nothing_left):
    scene = Scene(
        {"lead": [action(do="run", cmd="ln -s / leak; sleep 60")]}, limits=TeamLimits(deadline_s=0.5)
    )
    nothing_left(scene)
    result = scene.run()
    assert (result.ended, bool(result.diff)) == ("deadline", False)


class Stuck(OpenBox):
    async def kill(self):
        await super().kill()
        raise CapacityError("the host cannot say who is left")


def test_a_box_that_cannot_be_removed_costs_no_finished_work():
    scene = Scene({"lead": [action(do="edit", path="app.py", old="x = 1", new="x = 2"), action(do="submit")]})
    scene.boxes.kind = Stuck
    result = scene.run()
    assert result.solved
    assert result.diff.changed == {"app.py": b"x = 2\n"}
    assert result.leaks == ("lead's sandbox could not be freed: the host cannot say who is left",)
    assert scene.team.check_integrity() == ["lead"]
    assert result.leaks[0] in scene.lines


def test_cancelling_a_team_frees_everything(nothing_left):
    scene = Scene(
        {
            "lead": [action(do="spawn", name="ada", task="x"), action(do="wait", **{"for": ["ada"]})],
            "ada": ["never said"],
        }
    )
    nothing_left(scene)

    async def cancelled():
        asked = asyncio.Event()
        scene.models["ada"].gate = asyncio.Event()
        complete = scene.models["ada"].complete

        async def notice(*args, **kwargs):
            asked.set()
            return await complete(*args, **kwargs)

        scene.models["ada"].complete = notice
        task = asyncio.create_task(scene.team.run(chat_program("mend it", AgentLimits())))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(cancelled()) == []
    assert all(model.closed == 1 for model in scene.models.values())
    (call,) = scene.intervals("ada", "model.decode")
    assert call.attributes["ended_by"] == "CancelledError"


class Unreachable(ScriptedModel):
    async def complete(self, messages, **options):
        raise ModelError("no route to the model")


def test_a_teammate_that_fails_is_reported_to_those_who_wait(nothing_left):
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="x"),
                action(do="wait", **{"for": ["ada"]}),
                action(do="done"),
            ]
        }
    )
    scene.models["ada"] = Unreachable()
    nothing_left(scene)
    scene.result = scene.run()
    assert scene.observations("lead")[1] == "ada failed: no route to the model"


class Broken(OpenBox):
    async def run(self, command, *, timeout_s):
        raise OSError(24, "Too many open files")


def test_a_fault_of_the_platform_ends_one_teammate_and_not_the_team(nothing_left):
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="x"),
                action(do="wait", **{"for": ["ada"]}),
                action(do="edit", path="app.py", old="x = 1", new="x = 2"),
                action(do="submit"),
            ],
            "ada": [action(do="run", cmd="true")],
        }
    )
    scene.boxes.kinds["ada"] = Broken
    nothing_left(scene)
    scene.result = result = scene.run()
    assert scene.observations("lead")[1] == "ada failed: OSError: [Errno 24] Too many open files"
    assert result.solved
    assert {o.name: o.state for o in result.outcomes} == {"lead": "done", "ada": "failed"}


def test_such_a_fault_of_the_lead_is_raised_as_it_is(nothing_left):
    scene = Scene({"lead": [action(do="run", cmd="true")]})
    scene.boxes.kind = Broken
    nothing_left(scene)
    with pytest.raises(OSError, match="Too many open files"):
        scene.run()


def test_a_lead_that_fails_ends_the_run_with_its_error(nothing_left):
    scene = Scene({})
    scene.models["lead"] = Unreachable()
    nothing_left(scene)
    with pytest.raises(DockyardError, match="no route to the model"):
        scene.run()


def test_a_link_in_the_workspace_is_refused_as_a_diff():
    scene = Scene({"lead": [action(do="run", cmd="ln -s /etc/passwd leak"), action(do="submit")]})
    result = scene.run()
    assert result.ended == "gave up"
    assert not result.diff


def test_the_team_is_bounded():
    spawns = [action(do="spawn", name=f"a{n}", task="x") for n in range(3)]
    scene = Scene({"lead": [*spawns, action(do="submit")]}, limits=TeamLimits(max_members=2))
    scene.models["a0"] = ScriptedModel([action(do="done")])
    scene.result = scene.run()
    assert "the team has its 2 members" in scene.observations("lead")[1]


def test_a_teammate_ended_before_its_first_step_is_still_waited_for():
    scene = Scene({"lead": []})

    async def program(member):
        member.spawn("ada", program, "x")
        member.cancel("ada")
        waited = await member.join(["ada"])
        return Ending("done", waited.outcomes[0].state)

    result = asyncio.run(scene.team.run(program))
    assert {o.name: o.state for o in result.outcomes}["ada"] == "cancelled"
