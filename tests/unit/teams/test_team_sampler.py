import asyncio

import pytest
from team_doubles import Boxes, ScriptedModel

from teams.dag import Dag
from teams.harness.sampler import (
    SOLUTION_PATH,
    NothingDrawnError,
    SamplerLimits,
    SamplingProblem,
    run_sampler,
)
from teams.harness.task import TeamTask
from teams.model_client import ChatMessage, ModelError
from teams.team import Verdict
from teams.workspace import Tree

PROBLEM = SamplingProblem(
    name="toy/0",
    messages=(ChatMessage("user", "write f"),),
    extract=lambda answer: answer if "def f" in answer else "",
    examples=lambda program: f"{program}\nassert f(1) == 2\n",
)
WRONG = "def f(x):\n    return x\n"
RIGHT = "def f(x):\n    return x + 1\n"


async def verify(diff):
    program = diff.changed.get(SOLUTION_PATH, b"")
    return Verdict(program == RIGHT.encode(), "checked")


def sample(texts, **limits):
    models, boxes = {}, Boxes()

    def model(agent):
        models[agent] = ScriptedModel(texts.get(agent, ["no program"] * 9))
        return models[agent]

    task = TeamTask("toy/0", "write f", Tree({}), boxes, verify)
    outcome = asyncio.run(run_sampler(PROBLEM, task, model, limits=SamplerLimits(**limits)))
    assert boxes.open == []
    return outcome, models


def states(outcome):
    return {one.name: one.state for one in outcome.result.outcomes}


def test_the_first_program_that_passes_ends_the_search():
    slow = ["def f(x):\n    import time\n    time.sleep(60)\n"] * 4
    outcome, models = sample({"sampler-1": slow, "sampler-2": [WRONG, RIGHT], "sampler-3": slow})
    assert outcome.result.solved
    assert outcome.result.ended == "submit"
    assert states(outcome) == {
        "lead": "done",
        "sampler-1": "cancelled",
        "sampler-2": "done",
        "sampler-3": "cancelled",
    }
    assert models["sampler-2"].seeds == [2, 5]
    cut = [i for i in outcome.events.intervals if i.attributes.get("ended_by") == "CancelledError"]
    assert {interval.agent for interval in cut} == {"sampler-1", "sampler-3"}


def test_the_path_of_a_search_goes_through_the_winner_and_has_no_gap():
    outcome, _ = sample({"sampler-1": [WRONG] * 4, "sampler-2": [RIGHT], "sampler-3": [WRONG] * 4})
    dag = Dag(outcome.events)
    assert {"lead", "sampler-2"} <= {segment.agent for segment in dag.critical_path().segments}
    assert dag.attribution().untraced_share == 0
    assert {edge.kind for edge in outcome.events.edges} == {"spawn", "join", "message"}


def test_samplers_that_draw_nothing_are_no_verdict_on_programs():
    class Dead(ScriptedModel):
        async def complete(self, messages, **options):
            raise ModelError("connection refused: http://127.0.0.1:9/v1")

    boxes = Boxes()
    task = TeamTask("toy/0", "write f", Tree({}), boxes, verify)
    with pytest.raises(NothingDrawnError, match="no program could be drawn: connection refused"):
        asyncio.run(run_sampler(PROBLEM, task, lambda agent: Dead([])))
    assert boxes.open == []


def test_a_search_that_finds_nothing_says_so():
    texts = {f"sampler-{n}": [WRONG, "no program"] for n in (1, 2, 3)}
    outcome, _ = sample(texts, samples=2)
    assert not outcome.result.solved
    assert outcome.result.ended == "gave up"
    assert "none of 6 programs" in outcome.result.outcomes[0].summary
    assert len(outcome.result.transcript) == 6
