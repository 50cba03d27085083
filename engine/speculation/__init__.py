"""Speculation without a model in it: how many drafts hold, and how many are worth checking."""
