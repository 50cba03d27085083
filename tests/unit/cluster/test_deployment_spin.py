"""What a deployment's workers find in their environment of how long OpenMP's threads spin."""

import os
from pathlib import Path

import pytest

from cluster import deployment
from cluster.config import DockyardConfig


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_workers_spin_briefly_unless_the_user_has_chosen(
    chosen: dict[str, str], told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(chosen)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(deployment.ray_api, "start", lambda **_: None)  # which inherits it
    deployment._start_ray(DockyardConfig(), tmp_path, "dy-1")
    assert {name: value for name, value in environment.items() if "OMP_" in name} == told
