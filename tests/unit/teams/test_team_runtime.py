import asyncio

import pytest
from team_doubles import Boxes, OpenBox, ScriptedModel, action

from protocol.errors import DockyardError
from protocol.events import Edge
from sandbox.errors import CapacityError
from teams.agent import AgentLimits, chat_program
from teams.dag import Dag
from teams.events import EventLog
from teams.member import Ending
from teams.model_client import ModelError
from teams.team import Team, TeamLimits, Verdict
from teams.workspace import Tree

CLEAN = Tree({"app.py": b"x = 1\n"})


class Scene:
    """A team with scripted models in open boxes, and everything that it did."""

    def __init__(self, scripts, **settings):
        self.models = {name: ScriptedModel(texts) for name, texts in scripts.items()}
        self.boxes = Boxes()
        self.log = EventLog("run-test")
        self.lines = []
        self.graded = []
        settings.setdefault("verify", self.verify)
        self.team = Team(
            models=lambda name: self.models[name],
            sandboxes=self.boxes,
            workspace=CLEAN,
            events=self.log,
            progress=self.lines.append,
            **settings,
        )

    async def verify(self, diff):
        self.graded.append(diff)
        return Verdict(diff.changed.get("app.py") == b"x = 2\n", "checked", 1, 0, ("guard",))

    def run(self, **limits):
        return asyncio.run(self.team.run(chat_program("mend it", AgentLimits(**limits))))

    def intervals(self, agent, kind):
        return [i for i in self.log.intervals if i.agent == agent and i.kind == kind]

    def observations(self, agent):
        return [turn.observation for turn in self.result.transcript if turn.agent == agent]


@pytest.fixture
def nothing_left():
    """Checks that a scene's boxes are killed and its models closed."""
    scenes = []
    yield scenes.append
    for scene in scenes:
        assert scene.boxes.open == []
        assert scene.team.check_integrity() == []


def test_a_lead_alone_mends_and_submits(nothing_left):
    scene = Scene(
        {
            "lead": [
                action(do="run", cmd="cat app.py"),
                action(do="edit", path="app.py", old="x = 1", new="x = 2"),
                action(do="submit"),
            ]
        }
    )
    nothing_left(scene)
    result = scene.run()
    assert result.solved
    assert result.ended == "submit"
    assert result.diff.changed == {"app.py": b"x = 2\n"}
    assert [turn.action for turn in result.transcript] == ["run", "edit", "submit"]
    assert result.transcript[0].observation == "exit 0\nx = 1"
    assert scene.models["lead"].closed == 1
    assert "hidden tests: checked" in scene.lines


def team_of_three():
    return Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="find"),
                action(do="spawn", name="bo", task="mend"),
                action(do="wait", **{"for": ["ada", "bo"]}),
                action(do="take", **{"from": "bo"}),
                action(do="submit"),
            ],
            "ada": [
                action(do="run", cmd="sleep 0.05; grep -n x app.py"),
                action(do="send", to="bo", text="line 1"),
                action(do="done", summary="found"),
            ],
            "bo": [
                action(do="wait", **{"for": "message"}),
                action(do="edit", path="app.py", old="x = 1", new="x = 2"),
                action(do="done", summary="mended"),
            ],
        }
    )


def test_teammates_work_in_their_own_copies_and_report(nothing_left):
    scene = team_of_three()
    nothing_left(scene)
    scene.result = result = scene.run()
    assert result.solved
    assert {o.name: (o.state, o.summary) for o in result.outcomes} == {
        "lead": ("done", ""),
        "ada": ("done", "found"),
        "bo": ("done", "mended"),
    }
    assert scene.observations("bo")[0] == "ada writes: line 1"
    assert scene.observations("lead")[2].splitlines() == ["ada done: found", "bo done: mended"]
    assert scene.observations("lead")[3] == "took from bo: app.py"
    assert len(scene.boxes.made) == 3


def test_the_events_of_a_team_leave_no_gap():
    scene = team_of_three()
    scene.result = scene.run()
    kinds = {edge.kind for edge in scene.log.edges}
    assert kinds == {"spawn", "join", "message"}
    ids = {interval.id: interval for interval in scene.log.intervals}
    for edge in scene.log.edges:
        source, target = ids[edge.source], ids[edge.target]
        assert source.end_ns <= target.end_ns
        assert source.agent != target.agent
        assert (edge.kind == "spawn") == (target.kind == "harness")
    dag = Dag(scene.log)
    path = dag.critical_path()
    assert sum(segment.duration_ns for segment in path.segments) == round(path.makespan_s * 1e9)
    assert {segment.agent for segment in path.segments} == {"lead", "ada", "bo"}
    attribution = dag.attribution()
    assert attribution.untraced_share == 0
    (graded,) = scene.intervals("lead", "verify")
    assert graded.attributes["shortfalls"] == "guard"
    assert scene.result.shortfalls == ("apparmor", "guard")
    for agent in ("lead", "ada", "bo"):
        (made,) = scene.intervals(agent, "sandbox.create")
        assert made.attributes["shortfalls"] == "apparmor"


def until(path):
    """A command that ends once `path` is there."""
    return f"while [ ! -e {path} ]; do sleep 0.02; done"


def test_waiting_for_a_teammates_command_is_charged_to_that_command(tmp_path):
    at_work = tmp_path / "at-work"
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="x"),
                action(do="run", cmd=until(at_work)),
                action(do="take", **{"from": "ada"}),
                action(do="submit"),
            ],
            "ada": [action(do="run", cmd=f"echo 'x = 2' > app.py; touch {at_work}; sleep 0.3")] * 2,
        }
    )
    result = scene.run()
    assert result.solved
    (queue,) = scene.intervals("lead", "tool.queue")
    command = scene.intervals("ada", "tool.run")[0]
    assert Edge("unblock", command.id, queue.id) in scene.log.edges
    assert queue.start_ns < command.end_ns <= queue.end_ns
    (look,) = [i for i in scene.intervals("lead", "tool.run") if i.name == "look"]
    assert look.start_ns >= command.end_ns
    path = Dag(scene.log).critical_path()
    assert {"ada", "lead"} <= set(path.agents)
    assert "unblock" in path.edge_kinds
    assert not [s for s in path.segments if s.kind == "tool.queue"]


def test_a_message_that_comes_early_waits_for_its_reader(tmp_path):
    sent = tmp_path / "sent"
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="tell"),
                action(do="run", cmd=until(sent)),
                action(do="wait", **{"for": "message"}),
                action(do="done"),
            ],
            "ada": [
                action(do="send", to="lead", text="here"),
                action(do="run", cmd=f"touch {sent}"),
                action(do="done"),
            ],
        }
    )
    scene.result = scene.run()
    assert scene.observations("lead")[1].endswith('[1 unread: wait for "message"]')
    assert scene.observations("lead")[2] == "ada writes: here"


def test_a_wait_that_nobody_can_end_is_ended(nothing_left):
    scene = Scene(
        {
            "lead": [
                action(do="spawn", name="ada", task="wait"),
                action(do="wait", **{"for": ["ada"]}),
                action(do="done"),
            ],
            "ada": [action(do="wait", **{"for": "message"}), action(do="done")],
        }
    )
    nothing_left(scene)
    scene.result = scene.run()
    assert "nobody is left" in scene.observations("ada")[0]
    assert scene.observations("lead")[1] == "ada done:"
    stuck = [i for i in scene.log.intervals if i.attributes.get("stuck")]
    assert {interval.agent for interval in stuck} == {"ada"}


def test_what_a_model_does_wrong_is_told_to_it():
    scene = Scene(
        {
            "lead": [
                "hm",
                action(do="edit", path="app.py", old="y", new="z"),
                action(do="write", path="../up.py", content=""),
                action(do="spawn", name="Bad Name", task="x"),
                action(do="wait", **{"for": ["nobody"]}),
                action(do="send", to="lead", text="me"),
                action(do="take", **{"from": "nobody"}),
                action(do="spawn", name="ada", task="try"),
                action(do="wait", **{"for": ["ada"]}),
                action(do="done"),
            ],
            "ada": [action(do="spawn", name="eve", task="x"), action(do="submit"), action(do="done")],
        }
    )
    scene.result = scene.run()
    lead = scene.observations("lead")
    assert all(text.startswith("error: ") for text in lead[:7])
    assert "0 action blocks" in lead[0]
    assert "occurs 0 times in app.py" in lead[1]
    assert "not inside the workspace" in lead[2]
    assert [text.split(" (")[0] for text in scene.observations("ada")[:2]] == [
        "error: only the lead starts teammates",
        "error: only the lead submits",
    ]


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
