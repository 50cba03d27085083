"""HTTP dialects in front of the engines. One process a node."""
