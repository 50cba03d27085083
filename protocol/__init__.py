"""Frozen values that cross planes, one noun a file. No behaviour, and no import of ours."""
