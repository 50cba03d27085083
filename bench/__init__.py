"""One file a claim: `python -m bench.NAME --json` prints what it measured as one JSON object."""
