"""Keys of cached blocks: a chain of hashes, so that a key names a block's content and all before it.

What decides a block's bits goes into its key: the model's fingerprint and the version of its weights, the
tenant's salt, the tokens, the images among them, and where windows were run again behind a cached prefix
(`resumed`): entries behind such a place are not those of a whole pass. Equal keys mean equal bytes, in every
process and on every node: the hash is BLAKE2b, and never Python's own.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageKey:
    """An image among a prompt's tokens: positions start .. stop - 1, and a digest of what it shows."""

    start: int
    stop: int
    digest: str


def root_key(model: str, version: str = "", salt: str = "") -> bytes:
    """Where a chain begins. `salt` sets tenants apart, as vLLM's `cache_salt`."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (model, version, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_key(
    previous: bytes, token_ids: Sequence[int], images: Sequence[ImageKey] = (), *, resumed: bool = False
) -> bytes:
    """Of a block whose tokens follow those of `previous`. `images`: those that touch it (`images_of`).

    `resumed`: windows were run again before its first position.
    """
    digest = hashlib.blake2b(previous, digest_size=KEY_BYTES)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    for image in images:
        digest.update(f"|image {image.start} {image.stop} {image.digest}".encode())
    if resumed:
        digest.update(b"|resumed")
    return digest.digest()


def images_of(images: Sequence[ImageKey], start: int, stop: int) -> tuple[ImageKey, ...]:
    """The images that touch positions [start, stop), their positions counted from `start`."""
    return tuple(
        ImageKey(image.start - start, image.stop - start, image.digest)
        for image in images
        if image.start < stop and image.stop > start
    )
