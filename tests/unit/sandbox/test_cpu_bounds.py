"""What the groups above a sandbox leave it of the processors."""

from pathlib import Path

import pytest

from sandbox.cgroups import TOP, Hierarchy
from sandbox.cpu_bound import cpu_bound
from sandbox.errors import InvalidArgument
from sandbox.limits import Asked, LimitName, settle

ALL: frozenset[LimitName] = frozenset({"cpu", "memory", "pids", "disk"})
STATE = "u1000x0123456789ab"


def tree(root: Path, version: int, shares: dict[str, tuple[int, int]]) -> Hierarchy:
    for place in ("", TOP, f"{TOP}/{STATE}"):
        (root / place).mkdir(exist_ok=True)
        quota, period = shares.get(place, (-1, 100_000))
        if version == 2 and place:  # the machine's own root has none
            (root / place / "cpu.max").write_text(f"{'max' if quota < 0 else quota} {period}\n")
        elif version == 1:
            (root / place / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (root / place / "cpu.cfs_period_us").write_text(f"{period}\n")
    return Hierarchy(root, 1 if version == 1 else 2, frozenset({"cpu"}))


@pytest.mark.parametrize("version", [1, 2])
def test_the_fewest_cores_of_all_above_count(tmp_path: Path, version: int):
    shares = {TOP: (200_000, 50_000), f"{TOP}/{STATE}": (50_000, 100_000)}
    assert cpu_bound((tree(tmp_path, version, shares),), STATE) == 0.5
    assert cpu_bound((tree(tmp_path, version, {TOP: (200_000, 50_000)}),), STATE) == 4.0
    assert cpu_bound((tree(tmp_path, version, {}),), STATE) is None


def test_what_is_not_there_bounds_nothing(tmp_path: Path):
    assert cpu_bound((Hierarchy(tmp_path, 1, frozenset({"cpu"})),), STATE) is None
    assert cpu_bound((Hierarchy(tmp_path, 2, frozenset({"memory"})),), STATE) is None
    assert cpu_bound((), STATE) is None


def test_a_default_beyond_the_bound_is_the_bound():
    assert settle(Asked(), ALL, most_cpus=0.5).cpus == 0.5
    assert settle(Asked(), ALL, most_cpus=4.0).cpus == 1.0
    assert settle(Asked(cpu=0.5), ALL, most_cpus=0.5).cpus == 0.5


def test_what_was_written_and_is_beyond_the_bound_is_refused_by_it():
    with pytest.raises(InvalidArgument, match=r"cpu=1\.5 is more than the 0\.5 cores") as caught:
        settle(Asked(cpu=1.5), ALL, most_cpus=0.5)
    assert "0.5 at most" in caught.value.hint
