"""A layer in memory: launch mounts a tmpfs with a size and a number of inodes. Every host and user can."""

from pathlib import Path

from sandbox.layers.base import Layer, LayerSize


class MemoryLayers:
    """What is written counts as the sandbox's memory, so its memory limit bounds both together."""

    def missing(self, state_dir: Path) -> str:
        """Nothing: a host without tmpfs runs no sandbox."""
        del state_dir
        return ""

    def make(self, state_dir: Path, sandbox_id: str, size: LayerSize) -> Layer:
        """Launch makes it."""
        del state_dir, sandbox_id, size
        return Layer()

    def remove(self, layer: Layer) -> None:
        """It ends with the sandbox's mount namespace."""
        del layer
