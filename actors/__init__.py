"""Ray actors: thin shells around the planes, and the wires between them."""
