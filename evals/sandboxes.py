"""Sandboxes for grading: one for each program, made from the clean image and gone with its result."""

from collections.abc import Mapping
from pathlib import Path

from evals.grading import Execute, Execution
from evals.humaneval_config import SandboxSettings
from sandbox import AsyncSandbox, Policy

INTERPRETER = "/opt/toolkit/bin/python3"
KIB = 1024
# Beyond the tests' own time: starting and ending the sandbox on a busy host.
_LIFETIME_MARGIN_S = 60.0


def fresh_sandbox(
    settings: SandboxSettings, *, state_dir: Path | None = None, toolkit: Path | None = None
) -> Execute:
    """A function that runs a script in a sandbox of its own; may be called by several tasks at once.

    `state_dir` and `toolkit` are those of `Sandbox.create`. Calls raise `sandbox.errors.SandboxError` where
    no sandbox can be made or it fails; cancelled, they leave nothing behind.
    """
    output_bytes = settings.output_kb * KIB
    policy = Policy(
        network="none",
        output_bytes=output_bytes,
        output_total_bytes=output_bytes,
        timeout_s=settings.timeout_s,
    )

    async def execute(files: Mapping[str, bytes], script: str) -> Execution:
        sandbox = await AsyncSandbox.create(
            settings.image,
            settings.substrate,
            policy,
            memory_mb=settings.memory_mb,
            pids=settings.pids,
            disk_mb=settings.disk_mb,
            lifetime_s=settings.timeout_s + _LIFETIME_MARGIN_S,
            state_dir=state_dir,
            toolkit=toolkit,
        )
        async with sandbox:
            for name, data in files.items():
                await sandbox.files.write(f"/workspace/{name}", data)
            # Isolated: no site directory of a user, no environment, nothing from the working directory.
            result = await sandbox.commands.run([INTERPRETER, "-I", script], timeout_s=settings.timeout_s)
        return Execution(
            result.exit_code,
            result.stdout,
            result.stderr,
            result.reason,
            result.duration_ms,
            sandbox.info.shortfalls,
        )

    return execute
