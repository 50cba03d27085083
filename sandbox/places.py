"""Where things lie when the caller does not say."""

from pathlib import Path

# Built from sandbox/native at set-up.
INIT_BINARY = Path(__file__).parent / "native" / "dockyard-init"


def default_state_dir() -> Path:
    """Skeletons, journal and toolkit of this user."""
    return Path.home() / ".dockyard" / "sandbox"


def default_toolkit(state_dir: Path) -> Path:
    """The toolkit that belongs to a state directory."""
    return state_dir / "toolkit"
