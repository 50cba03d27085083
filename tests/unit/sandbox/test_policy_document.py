"""The policy's own fields: they narrow, and what would widen is refused by the field's name."""

import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox.audit_log import policy_digest
from sandbox.covers import Covers, covers_of
from sandbox.errors import InvalidArgument
from sandbox.images import Bind, Image
from sandbox.policy import Policy, presets
from sandbox.policy.document import DEVICES, MAX_TIMEOUT_S, read_policy

REPOSITORY = Path(__file__).parents[3]
NAMES = st.lists(st.text("ab_-.", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capabilities", ["CAP_SYS_ADMIN"]),
        ("capabilities", ["CAP_CHOWN"]),
        ("devices", ["kvm"]),
        ("devices", ["null", "/dev/mem"]),
        ("masked", ["/dev/null"]),
        ("masked", ["/.dockyard/init"]),
        ("masked", ["/proc"]),
        ("masked", ["/"]),
        ("masked", ["usr"]),
        ("masked", ["/usr/../etc"]),
        ("masked", ["/a"] * 65),
        ("read_only", ["workspace"]),
        ("read_only", ["/a\nb"]),
        ("read_only", ["/dev"]),
        ("read_only", ["//dev/"]),
        ("read_only", ["/dev/shm"]),
        ("timeout_s", float("inf")),
        ("timeout_s", MAX_TIMEOUT_S + 1),
        ("max_timeout_s", 0),
        ("max_timeout_s", float("nan")),
        ("output_total_bytes", 1 << 40),
        ("layer", "tape"),
    ],
)
def test_what_would_widen_is_refused_by_its_field(field: str, value: object):
    with pytest.raises(ValidationError) as caught:
        Policy.model_validate({field: value})
    assert {each["loc"][0] for each in caught.value.errors()} == {field}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"network": "agent"}, r"network='agent': .*\{\"services\": .*presets.*--preset"),
        ({"phases": {"work": "agent"}}, r"phases=\{'work': 'agent'\}: .*presets"),
        ({"network": {"services": ["pipy"]}}, r"network\.services=\['pipy'\]: 'pipy' is unknown; use "),
        ({"network": {"destinations": [{"to": "10.0.0.5"}]}}, r"network\.destinations\.0\.ports: Field req"),
        ({"network": 5}, "network=5: "),
        ({"netwrok": "none"}, "netwrok='none': "),
        ({"timeout_s": -1}, "timeout_s=-1: "),
        ({"without": ["landlock"], "read_only": ["/tmp"]}, "policy: read_only is"),
        ({"read_only": ["/dev"]}, r"read_only=.*/dev.*read-only in every sandbox.*leave it out"),
    ],
)
def test_one_error_names_the_field_the_value_and_the_way_out(values: dict[str, Any], said: str):
    for make in (lambda: Policy(**values), lambda: read_policy(json.dumps(values))):
        with pytest.raises(InvalidArgument, match=f"^{said}") as caught:
            make()
        assert "docs/sandbox.md" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"timeout_s": 5, "timeout_s": 600}', "timeout_s is there twice: 5 and 600"),
        ('{"network": "none", "network": {"services": ["pypi"]}}', "network is there twice: 'none' and "),
        ('{"network": {"services": [], "services": ["pypi"]}}', r"services is there twice: \[\] and "),
    ],
)
def test_a_field_that_is_there_twice_is_refused(text: str, said: str):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        read_policy(text)


def test_read_only_places_need_the_protection_that_holds_them():
    with pytest.raises(InvalidArgument, match="read_only is Landlock's"):
        Policy(read_only=("/tmp",), without=frozenset({"landlock"}))


def test_a_copy_is_checked_too():
    with pytest.raises(InvalidArgument, match="capabilities"):
        Policy().model_copy(update={"capabilities": frozenset({"CAP_BPF"})})
    assert Policy(timeout_s=5).model_copy(update={"masked": ("/usr/share",)}).timeout_s == 5


def test_the_null_device_is_always_there():
    assert Policy(devices=frozenset()).devices == {"null"}
    assert set(Policy(devices=frozenset({"tty"})).left_out) == DEVICES - {"null", "tty"}
    assert Policy().left_out == ()


def test_a_command_has_the_less_of_two_times():
    assert Policy().first_timeout_s == 60
    assert Policy(max_timeout_s=5).first_timeout_s == 5
    assert Policy(timeout_s=3, max_timeout_s=5).first_timeout_s == 3


def test_every_field_survives_json_and_tells_policies_apart():
    full: dict[str, Any] = {
        "network": {"services": ["pypi"]}, "phases": {"work": "none"}, "output_bytes": 1,
        "output_total_bytes": 2, "timeout_s": 3, "max_timeout_s": 4, "protected": ["/workspace/a"],
        "hidden": ["/workspace/b"], "masked": ["/usr/share"], "read_only": ["/tmp"], "devices": ["tty"],
        "capabilities": [], "layer": "disk", "without": ["seccomp"],
    }  # fmt: skip
    assert full.keys() == Policy.model_fields.keys()
    policy = Policy.model_validate(full)
    again = Policy.model_validate_json(policy.model_dump_json())
    assert again == policy
    assert hash(again) == hash(policy)
    for field in full:
        if field != "capabilities":
            other = Policy.model_validate({name: value for name, value in full.items() if name != field})
            assert other != policy
            assert policy_digest(other) != policy_digest(policy)


def test_a_digest_is_the_same_in_every_process():
    script = (
        "from sandbox import Policy; from sandbox.audit_log import policy_digest; "
        "print(policy_digest(Policy(devices={'tty', 'full', 'zero'}, without={'seccomp', 'guard'})))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


def test_the_graders_preset_asks_for_a_disk_where_there_is_one():
    assert presets.grader().layer == "disk-first"
    assert presets.offline().layer == "auto"


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A host's /usr and a skeleton with /etc, /tmp and a link."""
    usr, skeleton = tmp_path / "usr", tmp_path / "skeleton"
    for place in (usr / "share/doc", usr / "bin", skeleton / "etc", skeleton / "tmp", skeleton / "usr"):
        place.mkdir(parents=True)
    (usr / "bin/cc").touch()
    (skeleton / "etc/passwd").touch()
    (skeleton / "bin").symlink_to("usr/bin")
    (usr / "share/out").symlink_to("/etc")
    return Image("test", skeleton, (Bind(usr, "/usr"),), (), ("/tmp",), "/bin/sh", MappingProxyType({}))


def test_covers_are_found_in_the_image(image: Image):
    policy = Policy(
        masked=("//usr/share//doc/", "/usr/bin/cc", "/proc/version"), read_only=("/tmp", "/etc/passwd"),
        devices=frozenset({"tty"}),
    )  # fmt: skip
    covers = covers_of(policy, image)
    assert covers == Covers(
        ("/usr/share/doc",), ("/usr/bin/cc", "/proc/version"), ("/tmp", "/etc/passwd"),
        ("full", "ptmx", "random", "urandom", "zero"),
    )  # fmt: skip
    assert covers.writable(("/tmp", "/root")) == ("/root",)
    assert covers_of(Policy(), image) == Covers()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/usr/nothing", "is not in the image"),
        ("/nothing", "is not in the image"),
        ("/bin/cc", "is reached by a link"),
        ("/usr/share/out/passwd", "is reached by a link"),
        ("/tmp/a", "lies in /tmp, which is written to"),
        ("/proc/1/environ", "is one process's"),
        ("/proc/self/maps", "link|one process's"),
        ("/proc/no-such-file", "is not in the image"),
    ],
)
@pytest.mark.parametrize("field", ["masked", "read_only"])
def test_a_place_that_cannot_be_covered_is_refused_with_the_reason(
    image: Image, field: str, place: str, why: str
):
    with pytest.raises(InvalidArgument, match=rf"{field}: '{place}' .*({why})"):
        covers_of(Policy.model_validate({field: [place]}), image)


@given(NAMES)
def test_no_way_to_write_a_place_leads_out_of_the_image(parts: list[str]):
    """Either the document refuses it, or it is looked for below the image's own root."""
    place = "/" + "/".join(parts)
    try:
        policy = Policy(masked=(place,))
    except InvalidArgument:
        return
    empty = Image("t", Path("/nonexistent"), (), (), (), "/bin/sh", MappingProxyType({}))
    with pytest.raises(InvalidArgument, match="is not in the image"):
        covers_of(policy, empty)


def test_a_policy_is_read_from_json_as_a_file_has_it():
    text = json.dumps({"masked": ["/usr/share"], "devices": ["tty"], "max_timeout_s": 9})
    assert Policy.model_validate_json(text).left_out == ("full", "ptmx", "random", "urandom", "zero")


@pytest.mark.parametrize("page", ["sandbox.md", "egress.md"])
def test_the_pages_policies_are_policies(page: str):
    blocks = (REPOSITORY / "docs" / page).read_text().split("```json\n")[1:]
    assert blocks
    for block in blocks:
        assert read_policy(block.split("```")[0]) != Policy()
