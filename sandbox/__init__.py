"""Sandboxes of one machine: create, run, files, kill. Start with `Sandbox.create`."""

from sandbox.aio import AsyncSandbox
from sandbox.attached import AttachedSandbox
from sandbox.doctor import Capability
from sandbox.download import Download
from sandbox.egress.service import Egress
from sandbox.entries import Entry
from sandbox.policy import Destination, Names, Network, Policy
from sandbox.results import CommandResult, Denial
from sandbox.running import RunningCommand
from sandbox.sandbox import Sandbox, SandboxInfo, sandboxes
from sandbox.sessions import Session
from sandbox.snapshots import Snapshot, Snapshots
from sandbox.status import SandboxStatus
from sandbox.wire import TerminalSize

__all__ = [
    "AsyncSandbox",
    "AttachedSandbox",
    "Capability",
    "CommandResult",
    "Denial",
    "Destination",
    "Download",
    "Egress",
    "Entry",
    "Names",
    "Network",
    "Policy",
    "RunningCommand",
    "Sandbox",
    "SandboxInfo",
    "SandboxStatus",
    "Session",
    "Snapshot",
    "Snapshots",
    "TerminalSize",
    "sandboxes",
]
