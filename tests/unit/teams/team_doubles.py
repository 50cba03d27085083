"""Doubles for tests of the team runtime: a model that says what a script has, and a box without walls."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

from protocol.clock import SystemClock
from teams.model_client import Completion, Phase
from teams.workspace import CommandResult, Tree


def action(**fields):
    """A model's answer that holds one action."""
    import json

    return f"```action\n{json.dumps(fields)}\n```"


class ScriptedModel:
    """Says the texts of its script, or what it is forced to. Its time is spent in queue, prefill, decode."""

    def __init__(self, texts=(), *, gate=None):
        self.texts = list(texts)
        self.gate = gate  # an event that must be set before an answer comes
        self.seen = []
        self.closed = 0
        self.seeds = []

    async def close(self):
        self.closed += 1

    async def complete(self, messages, *, max_tokens, temperature, seed, forced=None):
        self.seen.append(tuple(messages))
        self.seeds.append(seed)
        start = SystemClock().now_ns()
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        text = forced if forced is not None else self.texts.pop(0)
        end = SystemClock().now_ns()
        third = (end - start) // 3
        phases = (
            Phase("model.queue", start, start + third, "gateway"),
            Phase("model.prefill", start + third, start + 2 * third, "gateway"),
            Phase("model.decode", start + 2 * third, end, "gateway"),
        )
        words = sum(len(message.content.split()) for message in messages)
        return Completion(text, phases, words, len(text.split()), "req-test")


class OpenBox:
    """A folder and a shell: for tests of what is above sandboxes, never for code that is not ours."""

    def __init__(self, name, tree):
        self.name = name
        self.killed, self.shortfalls = 0, ("apparmor",)
        self._folder = tempfile.TemporaryDirectory(prefix="open-box-")
        self.root = Path(self._folder.name)
        for path, data in tree.files.items():
            self._write(path, data)

    async def run(self, command, *, timeout_s):
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=self.root,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            return CommandResult(None, "", "timeout")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return CommandResult(process.returncode, output.decode())

    async def read(self, path):
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    async def write(self, path, data):
        self._write(path, data)

    async def remove(self, path):
        (self.root / path).unlink(missing_ok=True)

    async def snapshot(self):
        paths = [p for p in sorted(self.root.rglob("*")) if p.is_symlink() or p.is_file()]
        names = {p: p.relative_to(self.root).as_posix() for p in paths}
        regular = {names[p]: p.read_bytes() for p in paths if not p.is_symlink()}
        return Tree(regular, tuple(names[p] for p in paths if p.is_symlink()))

    async def kill(self):
        self.killed += 1
        self._folder.cleanup()

    def _write(self, path, data):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


class Boxes:
    """A factory that remembers what it made."""

    def __init__(self):
        self.made = []
        self.kind = OpenBox
        self.kinds = {}  # by the agent's name, where it differs

    async def __call__(self, name, tree):
        box = self.kinds.get(name.rpartition(".")[2], self.kind)(name, tree)
        self.made.append(box)
        return box

    @property
    def open(self):
        return [box.name for box in self.made if not box.killed]
