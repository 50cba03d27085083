"""`sandbox.files` for asyncio."""

from pathlib import Path

from sandbox.aio_threads import threaded
from sandbox.download import Download
from sandbox.entries import Entry
from sandbox.sandbox import Sandbox


class AsyncFiles:
    """`sandbox.files` for asyncio: each call runs in a thread, and goes on there when cancelled."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._files = sandbox.files

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See `Files.read`."""
        return await threaded(self._files.read, path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `Files.write`."""
        await threaded(self._files.write, path, data, mode=mode)

    async def list(self, path: str = "/workspace") -> tuple[Entry, ...]:
        """See `Files.list`."""
        return await threaded(self._files.list, path)

    async def stat(self, path: str) -> Entry:
        """See `Files.stat`."""
        return await threaded(self._files.stat, path)

    async def exists(self, path: str) -> bool:
        """See `Files.exists`."""
        return await threaded(self._files.exists, path)

    async def make_dir(self, path: str) -> None:
        """See `Files.make_dir`."""
        await threaded(self._files.make_dir, path)

    async def remove(self, path: str) -> None:
        """See `Files.remove`."""
        await threaded(self._files.remove, path)

    async def rename(self, path: str, to: str) -> None:
        """See `Files.rename`."""
        await threaded(self._files.rename, path, to)

    async def upload_dir(self, host_dir: Path | str, path: str, *, max_bytes: int = 256 << 20) -> int:
        """See `Files.upload_dir`."""
        return await threaded(self._files.upload_dir, host_dir, path, max_bytes=max_bytes)

    async def download_dir(self, path: str, *, max_bytes: int = 64 << 20) -> Download:
        """See `Files.download_dir`."""
        return await threaded(self._files.download_dir, path, max_bytes=max_bytes)
