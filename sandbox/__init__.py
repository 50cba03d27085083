"""Sandboxes of one machine: create, run, files, kill. Start with `Sandbox.create`."""

from sandbox.aio import AsyncSandbox
from sandbox.commands import RunningCommand
from sandbox.doctor import Capability
from sandbox.files import Download
from sandbox.policy import Policy
from sandbox.results import CommandResult, Denial
from sandbox.sandbox import Sandbox, SandboxInfo
from sandbox.wire import Entry

__all__ = [
    "AsyncSandbox",
    "Capability",
    "CommandResult",
    "Denial",
    "Download",
    "Entry",
    "Policy",
    "RunningCommand",
    "Sandbox",
    "SandboxInfo",
]
