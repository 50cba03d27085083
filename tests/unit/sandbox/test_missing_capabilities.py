"""What a host lacks is named as the doctor names it, so that a program can look it up."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import making
from sandbox.egress import namespaces, service
from sandbox.errors import UnsupportedError
from sandbox.images import prepare_image
from sandbox.places import INIT_BINARY
from sandbox.policy import Policy, apparmor_profiles
from sandbox.substrates import find_substrate

NOWHERE = Path("/nowhere")


def protected() -> None:
    making._profile(Policy(protected=("/root/notes",)), NOWHERE)


def hidden() -> None:
    making._profile(Policy(hidden=("/root/notes",)), NOWHERE)


def without_init() -> None:
    prepare_image("host", state_dir=NOWHERE, init=NOWHERE, toolkit=NOWHERE)


def without_toolkit() -> None:
    prepare_image("host", state_dir=NOWHERE, init=INIT_BINARY, toolkit=NOWHERE)


@pytest.mark.parametrize(
    ("attempt", "capability"),
    [
        (protected, "apparmor"),
        (hidden, "apparmor"),
        (lambda: find_substrate("function").check(privileged=True, runtime=None), "substrate function"),
        (lambda: find_substrate("container").check(privileged=True, runtime=None), "substrate container"),
        (service.check, "egress policy"),
        (namespaces.check_tools, "egress policy"),
        (without_init, "static init"),
        (without_toolkit, "toolkit"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_what_a_host_lacks_has_the_doctors_name(
    attempt: Callable[[], None], capability: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(apparmor_profiles, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(service, "EGRESS_OBJECT", NOWHERE)
    with pytest.raises(UnsupportedError) as caught:
        attempt()
    assert caught.value.capability == capability
    assert caught.value.record()["capability"] == capability
