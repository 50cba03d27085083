"""Recorded team runs, one JSON file a task (`teams.harness.recording` has the format)."""
