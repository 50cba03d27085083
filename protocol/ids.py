"""Identifiers: a short prefix that says what the thing is, and 60 random bits."""

import secrets
from typing import Literal

Prefix = Literal["run", "req", "sbx", "ses", "trial", "ivl"]


def new_id(prefix: Prefix) -> str:
    """A fresh id such as `run-3f9a61c04be2d17`."""
    return f"{prefix}-{secrets.token_hex(8)[:15]}"
