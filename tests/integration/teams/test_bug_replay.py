"""The recorded teams of part D, in real sandboxes, with a model that says what it is forced to."""

import asyncio
import dataclasses

import pytest
from forced_model import ForcedModel

from evals import team_bugs
from teams.dag import Dag
from teams.workspace import Tree


def opened(name, sources, boxes):
    return asyncio.run(team_bugs.open_task(name, sources, boxes))


@pytest.mark.parametrize(
    ("name", "substrate"), [("h11", "container"), ("parse", "function")], indirect=["substrate"]
)
def test_a_recorded_team_mends_a_real_bug(name, sources, boxes):
    task = opened(name, sources, boxes)
    outcome = asyncio.run(
        team_bugs.replay(task, models=lambda agent: ForcedModel(seconds=0.02), sandboxes=boxes)
    )
    assert outcome.diverged is None
    assert outcome.replay
    assert outcome.result.solved, outcome.result.verdict
    assert {one.state for one in outcome.result.outcomes} == {"done"}
    dag = Dag(outcome.events)
    path, attribution = dag.critical_path(), dag.attribution()
    assert sum(segment.duration_ns for segment in path.segments) == round(path.makespan_s * 1e9)
    assert attribution.untraced_share <= 0.01
    assert len({segment.agent for segment in path.segments}) >= 2
    assert {"tool.run", "model.prefill", "model.decode"} <= {segment.kind for segment in path.segments}
    waits = {interval.id for interval in outcome.events.intervals if interval.kind == "wait"}
    assert {"join", "message"} <= {edge.kind for edge in outcome.events.edges if edge.target in waits}


@pytest.mark.parametrize("substrate", ["function"], indirect=True)
def test_a_real_output_that_no_longer_fits_is_reported(sources, boxes):
    task = opened("parse", sources, boxes)
    moved = dataclasses.replace(task, workspace=Tree({**task.workspace.files, "NOTES": b"new\n"}))
    outcome = asyncio.run(team_bugs.replay(moved, models=lambda agent: ForcedModel(), sandboxes=boxes))
    assert (outcome.diverged.agent, outcome.diverged.number) == ("lead", 1)
    assert "NOTES" in outcome.diverged.observation
    assert outcome.result.solved
