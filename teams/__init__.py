"""Teams of agents: the runtime, the event log, and the critical path of a run."""

from teams.dag import Dag
from teams.events import EventLog
from teams.harness.chat import run_live
from teams.harness.recorded import run_replay
from teams.harness.task import TeamOutcome, TeamTask
from teams.team import Team

__all__ = ["Dag", "EventLog", "Team", "TeamOutcome", "TeamTask", "run_live", "run_replay"]
