"""Writable layers of sandboxes: one mechanism a file, chosen in `choice`."""

from sandbox.layers.base import LayerKind, LayerWish

__all__ = ["LayerKind", "LayerWish"]
