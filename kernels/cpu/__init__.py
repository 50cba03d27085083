"""The CPU path in C: one shared library, built by `python -m kernels.cpu.build`, and its typed wrappers."""
