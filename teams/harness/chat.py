"""The live harness: a lead chats with a model of any OpenAI-compatible endpoint, and starts teammates."""

from teams.agent import AgentLimits, chat_program
from teams.harness.task import RunOptions, TeamOutcome, TeamTask, run_program
from teams.team import ModelFactory


async def run_live(
    task: TeamTask,
    models: ModelFactory,
    *,
    agents: AgentLimits | None = None,
    options: RunOptions | None = None,
) -> TeamOutcome:
    """Runs a live team on a task.

    `models` makes one client an agent, by the agent's name. Raises the `DockyardError` that ended the lead.
    May be cancelled; nothing is left then.
    """
    program = chat_program(task.instruction, agents or AgentLimits())
    result, events = await run_program(task, program, models, options or RunOptions())
    return TeamOutcome(task.name, replay=False, result=result, events=events)
