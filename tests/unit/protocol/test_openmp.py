"""How long OpenMP's threads spin is chosen before torch is loaded, and by the user first."""

import os
import subprocess
import sys

import pytest

SAY = "import os; print(os.environ.get('GOMP_SPINCOUNT', 'as it was'))"


@pytest.mark.parametrize(
    ("code", "chosen", "said"),
    [
        ("import engine.errors", {}, "2000"),
        ("import engine.errors", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import engine.errors", {"OMP_WAIT_POLICY": "active"}, "as it was"),
        ("import torch, engine.errors", {}, "as it was"),
    ],
)
def test_threads_spin_briefly_unless_it_is_too_late_or_the_user_has_chosen(
    code: str, chosen: dict[str, str], said: str
):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    words = [sys.executable, "-c", f"{code}; {SAY}"]
    done = subprocess.run(words, env={**inherited, **chosen}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
