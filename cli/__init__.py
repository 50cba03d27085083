"""The `dockyard` command."""
