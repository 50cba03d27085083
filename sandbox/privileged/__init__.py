"""All that runs as root so that an ordinary user's sandboxes have cgroups, ids and networks."""
