import asyncio
import json

import pytest
from team_doubles import Boxes, ScriptedModel, action

from protocol.errors import InvalidInput
from teams.harness.chat import run_live
from teams.harness.recorded import ReplayError, run_replay
from teams.harness.recording import RecordedTurn, Recording, load_recording, save_recording, with_digests
from teams.harness.task import RunOptions, TeamTask
from teams.team import Verdict
from teams.tools import Run, Send, Wait, parse_action
from teams.workspace import Tree


def recording_of(**agents):
    return Recording(
        format="dockyard.team-recording",
        version=1,
        task="toy",
        title="A toy",
        origin="a test",
        licence="none",
        agents={name: tuple(RecordedTurn(text=text) for text in texts) for name, texts in agents.items()},
    )


TOY = recording_of(
    lead=[
        action(do="spawn", name="ada", task="look"),
        action(do="run", cmd="echo took 0.13s"),
        action(do="wait", **{"for": ["ada"]}),
        action(do="submit"),
    ],
    ada=[action(do="run", cmd="cat app.py"), action(do="done", summary="x")],
)


def replay(recording, *, app=b"x = 1\n", models=lambda agent: ScriptedModel()):
    async def verify(diff):
        return Verdict(True, "checked")

    task = TeamTask("toy", "look", Tree({"app.py": app}), Boxes(), verify)
    return asyncio.run(run_replay(recording, task, models))


def test_a_replay_of_its_own_recording_does_not_diverge():
    first = replay(TOY)
    assert first.replay
    recorded = with_digests(TOY, first.result.transcript)
    assert [turn.digest != "" for turn in recorded.agents["lead"]] == [False, True, False, False]
    second = replay(recorded)
    assert second.diverged is None
    assert second.result.solved


def test_a_tool_that_gives_something_else_is_the_first_divergence():
    recorded = with_digests(TOY, replay(TOY).result.transcript)
    outcome = replay(recorded, app=b"x = 2\n")
    assert (outcome.diverged.agent, outcome.diverged.number) == ("ada", 1)
    assert "x = 2" in outcome.diverged.observation  # what really came, and what the agent was shown
    shown = [turn.observation for turn in outcome.result.transcript if turn.agent == "ada"]
    assert shown[0] == "exit 0\nx = 2"
    assert outcome.result.solved  # the run went on to its end


def test_a_turn_that_does_not_happen_is_a_divergence():
    recorded = with_digests(TOY, replay(TOY).result.transcript)
    longer = recorded.model_copy(
        update={"agents": {**recorded.agents, "bo": (RecordedTurn(text="never spawned"),)}}
    )
    outcome = replay(longer)
    assert (outcome.diverged.agent, outcome.diverged.number) == ("bo", 1)


def test_an_engine_that_does_not_force_is_an_error():
    class Free(ScriptedModel):
        async def complete(self, messages, *, forced=None, **options):
            return await super().complete(messages, forced="something else", **options)

    with pytest.raises(ReplayError, match="forced_text"):
        replay(TOY, models=lambda agent: Free())


def test_a_recording_of_another_task_is_refused():
    with pytest.raises(InvalidInput, match="of task 'other'"):
        replay(TOY.model_copy(update={"task": "other"}))


def test_an_agent_that_the_recording_lacks_fails_the_replay():
    outcome = replay(recording_of(lead=TOY.agents and [turn.text for turn in TOY.agents["lead"]]))
    states = {one.name: (one.state, one.summary) for one in outcome.result.outcomes}
    assert states["ada"] == ("failed", "the recording has no agent 'ada'")


def test_the_live_harness_runs_the_same_loop(tmp_path):
    task = TeamTask("toy", "look", Tree({"app.py": b""}), Boxes())
    path = tmp_path / "events.jsonl"
    model = ScriptedModel([action(do="run", cmd="ls"), action(do="submit")])
    outcome = asyncio.run(run_live(task, lambda agent: model, options=RunOptions(events_path=path)))
    assert not outcome.replay
    assert outcome.result.ended == "submit"
    assert model.seen[0][1].content == "look"
    assert path.stat().st_size > 0
    assert path.with_suffix(".mail.jsonl").exists()


def test_a_saved_recording_loads_again(tmp_path):
    path = tmp_path / "toy.json"
    recorded = with_digests(TOY, replay(TOY).result.transcript)
    save_recording(recorded, path)
    assert load_recording(path) == recorded


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"agents": {"ada": [{"text": "x"}]}}, "nobody is called 'lead'"),
        ({"agents": {"lead": []}}, "agents.lead"),
        ({"agents": {"lead": [{"text": "x"}], "A\x1b[2J": [{"text": "x"}]}}, "agents.*match pattern"),
        ({"agents": {"lead": [{"text": "x", "digest": "zz"}]}}, "digest"),
    ],
)
def test_what_is_no_recording_is_refused_by_its_field(tmp_path, change, advice):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**json.loads(TOY.model_dump_json()), **change}))
    with pytest.raises(InvalidInput, match=advice):
        load_recording(path)


def test_a_missing_recording_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"none.json cannot be read: No such file"):
        load_recording(tmp_path / "none.json")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        load_recording(tmp_path)


def shipped(name):
    from importlib.resources import files

    return load_recording(files("teams.recordings") / f"{name}.json")


@pytest.mark.parametrize("name", ["h11", "parse"])
def test_the_shipped_recordings_are_whole(name):
    recording = shipped(name)
    assert len(recording.agents) >= 3
    actions = {
        agent: [parse_action(turn.text) for turn in turns] for agent, turns in recording.agents.items()
    }
    everything = [one for turns in actions.values() for one in turns]
    assert len(everything) >= 30
    assert sum(one.do in ("run", "write", "edit", "take") for one in everything) >= 15
    assert any(isinstance(one, Wait) and one.target == ["tester", "mender"] for one in actions["lead"])
    assert any(isinstance(one, Send) and one.to == "mender" for one in actions["tester"])
    assert any(isinstance(one, Wait) and one.target == ["message"] for one in actions["mender"])
    assert actions["lead"][-1].do == "submit"
    for agent, turns in recording.agents.items():
        for turn, one in zip(turns, actions[agent], strict=True):
            assert bool(turn.digest) == (one.do in ("run", "write", "edit", "take"))
            if isinstance(one, Run):
                assert "sleep" not in one.cmd
