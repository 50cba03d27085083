"""Which rows run in the next step. Pure Python: no torch, no clock, no I/O."""
