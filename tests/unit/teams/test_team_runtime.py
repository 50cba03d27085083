from team_doubles import action
from team_scene import Scene, nothing_left, until

from protocol.events import Edge
from teams.dag import Dag

__all__ = ["nothing_left"]  # a fixture


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
