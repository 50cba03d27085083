"""The configuration root, local Ray clusters, deployments of a model, and what `dockyard down` ends."""
