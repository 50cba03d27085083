"""A team in a test: scripted models, open boxes, and all that it did."""

import asyncio

import pytest
from team_doubles import Boxes, ScriptedModel

from teams.agent import AgentLimits, chat_program
from teams.events import EventLog
from teams.team import Team, Verdict
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


def until(path):
    """A command that ends once `path` is there."""
    return f"while [ ! -e {path} ]; do sleep 0.02; done"
