"""The report of a run: its values, and the same values as plain text and as one HTML file."""

from teams.report.html import render_html
from teams.report.model import HumanEvalReport, RunReport, TeamReport, WorkerRow
from teams.report.team_rows import team_report
from teams.report.text import render_text

__all__ = [
    "HumanEvalReport",
    "RunReport",
    "TeamReport",
    "WorkerRow",
    "render_html",
    "render_text",
    "team_report",
]
