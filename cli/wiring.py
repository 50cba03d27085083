"""Connects evaluations and teams to this machine's sandboxes and to a model's endpoint."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pydantic import SecretStr

from cli.placing import PlacedBoxes, SandboxPlaces, placed_execute
from cluster.config import DockyardConfig, SandboxConfig
from cluster.state import StateFolder
from cluster.status import outstanding_bytes
from evals.grading import Execute
from evals.humaneval_config import SandboxSettings
from evals.sandboxes import fresh_sandbox
from evals.store import Store
from evals.team_record import TeamRecord
from evals.team_sandboxes import BoxConfig, Boxes
from protocol.errors import MissingCapability
from protocol.ids import new_id
from protocol.resources import Resources
from sandbox.audit import sweep
from teams.harness.task import RunOptions, TeamOutcome
from teams.model_client import http_models
from teams.report.model import TeamReport
from teams.report.team_rows import team_report
from teams.team import ModelFactory
from teams.workspace import SandboxFactory

_DEFAULT_MEMORY_MB = 512  # what a sandbox takes where nothing else is said


@dataclass(frozen=True, slots=True)
class ModelAt:
    """A model and where it answers. `api_key` None: each agent has its own, made of the run and its name."""

    url: str  # ends in /v1
    model: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Workbench:
    """What a run stands on: its configuration and folders."""

    config: DockyardConfig
    state: StateFolder
    run_id: str
    folder: Path
    places: SandboxPlaces
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)  # of agents; may be secret

    @classmethod
    def open(cls, config: DockyardConfig, *, env: Mapping[str, str] | None = None) -> "Workbench":
        """A fresh run folder that holds the resolved configuration. Removes what crashed runs left.

        Sandboxes get the memory that is free now and promised to no worker: open it once the server runs.
        Raises MissingCapability where set-up has not been run.
        """
        state = require_toolkit(config)
        sweep(state.sandboxes)
        run_id = new_id("run")
        folder = state.runs / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{run_id}"
        folder.mkdir()
        (folder / "config.yaml").write_text(config.resolved_yaml())
        places = SandboxPlaces(state.root, outstanding_bytes(config))
        return cls(config, state, run_id, folder, places, env or {})

    def grader(self) -> Execute:
        """Runs a program in a sandbox of its own."""
        settings = SandboxSettings(
            substrate=self._box.substrate,
            memory_mb=self._box.memory_mb,
            pids=self._box.pids,
            disk_mb=self._box.disk_mb,
        )
        execute = fresh_sandbox(settings, state_dir=self.state.sandboxes, toolkit=self.state.toolkit)
        return placed_execute(execute, self.places, self._resources)

    def boxes(self) -> SandboxFactory:
        """Makes agents' sandboxes."""
        config = BoxConfig(
            env={name: SecretStr(value) for name, value in self.env.items()},
            substrate=self._box.substrate,
            memory_mb=self._box.memory_mb,
            pids=self._box.pids,
            disk_mb=self._box.disk_mb,
            state_dir=self.state.sandboxes,
            toolkit=self.state.toolkit,
        )
        return PlacedBoxes(Boxes(config), self.places, self._resources)

    @property
    def _box(self) -> SandboxConfig:
        return self.config.sandbox

    @property
    def _resources(self) -> Resources:
        box = self._box
        return Resources(1.0, (box.memory_mb or _DEFAULT_MEMORY_MB) << 20, box.pids, box.disk_mb << 20)

    def models(self, at: ModelAt, run_id: str) -> ModelFactory:
        """One client an agent."""
        return http_models(at.url, model=at.model, run_id=run_id, api_key=at.api_key)

    @contextmanager
    def record(self, task: str, model: str, options: RunOptions, *, replay: bool) -> Generator[TeamRecord]:
        """Keeps a team's run in the store, from before its start."""
        config = {"model": model, "replay": replay, "team_run_id": options.run_id}
        with Store(self.state.store) as store, TeamRecord(store, task, config) as record:
            yield record

    def options(self, name: str, progress: Callable[[str], None]) -> RunOptions:
        """Options of a team run whose events are kept in the run's folder."""
        return RunOptions(events_path=self.folder / f"events-{name}.jsonl", progress=progress)


def require_toolkit(config: DockyardConfig) -> StateFolder:
    """The state folder. Raises MissingCapability where set-up has not been run, before anything starts."""
    state = StateFolder(config.state_dir)
    if not state.toolkit.exists():
        raise MissingCapability(f"no sandbox toolkit at {state.toolkit}", hint="run: make setup")
    return state


def report_of(outcome: TeamOutcome) -> TeamReport:
    """A team's run as the reports show it."""
    result, diverged = outcome.result, outcome.diverged
    divergence = f"{diverged.agent}, turn {diverged.number}: {diverged.reason}" if diverged else ""
    return team_report(
        outcome.events,
        task=outcome.task,
        replay=outcome.replay,
        solved=result.solved,
        divergence=divergence,
        verdict=result.verdict.detail if result.verdict else result.ended,
        turns=result.transcript,
    )
