"""Model families behind one interface, and the files that they come from."""
