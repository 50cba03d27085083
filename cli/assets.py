"""What set-up makes beside the packages: the sandboxes' init and toolkit, and the sources of the bug tasks.

`python -m cli.assets` is the last step of `make setup`. Each part is skipped when it is there.
"""

import sys
from collections.abc import Callable

from cluster.config import load_config
from cluster.state import StateFolder
from evals.bugs import load_recipe, recipe_names
from evals.fetch import fetch_sdist
from kernels.cpu.build import build as build_kernels
from protocol.errors import DockyardError
from sandbox.egress.build import build as build_egress
from sandbox.guard.build import build as build_guard
from sandbox.native.build import build as build_init
from sandbox.toolkit import build_toolkit


def main() -> int:
    """Make every part; one that cannot be made is named with what it costs, and the others go on.

    1 where a part is missing without which nothing runs in a sandbox.
    """
    state = StateFolder(load_config().state_dir)
    parts: list[tuple[str, Callable[[], object], str, bool]] = [
        ("CPU kernels", build_kernels, "the model runs on PyTorch, several times slower", False),
        ("sandbox init", build_init, "no sandbox can start", True),
        ("egress programs", build_egress, "sandboxes with a network policy are refused", False),
        ("guard programs", build_guard, "sandboxes go without one protection of several", False),
        ("sandbox toolkit", lambda: build_toolkit(state.toolkit), "no sandbox has an interpreter", True),
        ("task sources", lambda: _fetch_sources(state), "the bug tasks cannot be set up", False),
    ]
    failed = False
    for name, make, cost, needed in parts:
        try:
            make()
            print(f"      {name}: ready", flush=True)
        except (DockyardError, OSError) as error:
            failed |= needed
            print(f"      {name}: {error}; without it, {cost}", flush=True)
    return int(failed)


def _fetch_sources(state: StateFolder) -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        for release in (recipe.old, recipe.new):
            fetch_sdist(recipe.sdist(release), state.cache)


if __name__ == "__main__":
    sys.exit(main())
