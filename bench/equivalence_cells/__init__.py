"""Cells of the equivalence matrix: each sends the same greedy prompts down another path of the engine."""
