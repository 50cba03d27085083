"""Sandboxes of one machine: create, run, files, kill. Start with `Sandbox.create`."""

from sandbox.policy import Policy
from sandbox.results import CommandResult, Denial
from sandbox.sandbox import Sandbox, SandboxInfo

__all__ = ["CommandResult", "Denial", "Policy", "Sandbox", "SandboxInfo"]
