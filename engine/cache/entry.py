"""A kept piece of KV as bytes of a file: a header that names it, and a checksum over everything.

Little-endian, 64 bytes: magic (4), version (2), kind (1), nothing (1), key (16), tag of the model and of its
weights' version (16), length of the payload (8), BLAKE2b of the header before it and the payload (16).
"""

import hashlib
import struct
from typing import Literal

import numpy as np

from protocol.handoff import KvPayload

Kind = Literal["block", "windows"]
HEADER_BYTES = 64
ENTRY_VERSION = 1

_MAGIC = b"DYKV"
_KINDS: dict[Kind, int] = {"block": 1, "windows": 2}
_FIELDS = struct.Struct("<4sHBx16s16sQ")
_DIGEST_BYTES = 16


def model_tag(model: str, version: str) -> bytes:
    """Of a fingerprint and a version of weights."""
    return hashlib.blake2b(f"{model}|{version}".encode(), digest_size=16).digest()


def encode_entry(kind: Kind, key: bytes, tag: bytes, payload: KvPayload) -> bytes:
    data = payload.tobytes()
    fields = _FIELDS.pack(_MAGIC, ENTRY_VERSION, _KINDS[kind], key, tag, len(data))
    return fields + _digest(fields, data) + data


def decode_entry(kind: Kind, key: bytes, tag: bytes, data: bytes) -> KvPayload | None:
    """The payload; None where the bytes are not whole, or are those of something else."""
    fields, digest, body = data[: _FIELDS.size], data[_FIELDS.size : HEADER_BYTES], data[HEADER_BYTES:]
    if fields != _FIELDS.pack(_MAGIC, ENTRY_VERSION, _KINDS[kind], key, tag, len(body)):
        return None
    if digest != _digest(fields, body):
        return None
    return np.frombuffer(body, np.uint8)


def _digest(fields: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=_DIGEST_BYTES)
    digest.update(body)
    return digest.digest()
