"""A team on a real bug: replayed from the recording that ships with the task, or live on any endpoint."""

import asyncio
from pathlib import Path

import teams.recordings
from evals.bugs import BugTask, build_task, load_folder, load_recipe, prepare, verifier
from protocol.errors import ResourceShortage
from protocol.ready_threads import ReadyThreads
from protocol.threads import NoThread
from teams.agent import AgentLimits
from teams.harness.chat import run_live
from teams.harness.recorded import run_replay
from teams.harness.recording import load_recording, save_recording, with_digests
from teams.harness.task import RunOptions, TeamOutcome, TeamTask
from teams.team import ModelFactory
from teams.workspace import SandboxFactory


def recording_path(name: str) -> Path:
    """Where the recording of a shipped bug task lies."""
    return Path(teams.recordings.__path__[0]) / f"{name}.json"


async def open_task(name_or_folder: str, cache_dir: Path, sandboxes: SandboxFactory) -> BugTask:
    """A shipped task by name, or a folder's; fetched and accepted, unless the cache knows it already.

    Raises `InvalidInput`, `FetchError`, `NotAcceptedError`, and `ResourceShortage` where there is no thread
    to read it. May be cancelled.
    """
    thread = _thread()
    try:
        task = await asyncio.get_running_loop().run_in_executor(thread, _read_task, name_or_folder, cache_dir)
    finally:
        thread.shutdown(wait=False)
    return await prepare(task, cache_dir, sandboxes)


def _thread() -> ReadyThreads:
    """Not the loop's own: for one that is not to be had, then or at its end, it would wait without end."""
    try:
        return ReadyThreads(1, "bug task")
    except NoThread as error:
        raise ResourceShortage(f"there is no thread to read the task: {error}") from error


def _read_task(name_or_folder: str, cache_dir: Path) -> BugTask:
    if "/" in name_or_folder or Path(name_or_folder).is_dir():
        return load_folder(Path(name_or_folder))
    return build_task(load_recipe(name_or_folder), cache_dir)


def team_task(task: BugTask, sandboxes: SandboxFactory) -> TeamTask:
    """A bug task as a team takes it."""
    return TeamTask(task.name, task.instruction, task.workspace, sandboxes, verifier(task, sandboxes))


async def replay(
    task: BugTask,
    *,
    models: ModelFactory,
    sandboxes: SandboxFactory,
    recording: Path | None = None,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Replays the task's recording (or another of it). Raises as `run_replay`. May be cancelled."""
    script = load_recording(recording or recording_path(task.name))
    return await run_replay(script, team_task(task, sandboxes), models, options=options)


async def live(
    task: BugTask,
    *,
    models: ModelFactory,
    sandboxes: SandboxFactory,
    agents: AgentLimits | None = None,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Runs the same kind of team live. Raises as `run_live`. May be cancelled."""
    return await run_live(team_task(task, sandboxes), models, agents=agents, options=options)


async def record(
    task: BugTask, *, models: ModelFactory, sandboxes: SandboxFactory, recording: Path | None = None
) -> TeamOutcome:
    """Replays the task's recording and writes the digests of this run's real outputs into it."""
    path = recording or recording_path(task.name)
    outcome = await replay(task, models=models, sandboxes=sandboxes, recording=path)
    save_recording(with_digests(load_recording(path), outcome.result.transcript), path)
    return outcome
