"""What each substrate asks launch for."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from sandbox.errors import InvalidArgument, UnsupportedError
from sandbox.images import Bind, Image, prepare_image
from sandbox.limits import Asked, settle
from sandbox.policy import Policy, Protection
from sandbox.policy.seccomp import filter_program, oci_beside_program, oci_seccomp, this_machine
from sandbox.substrates import find_substrate
from sandbox.substrates.base import Blueprint, LaunchPlan
from sandbox.substrates.container import find_runtime
from sandbox.substrates.oci import oci_config

IMAGE = Image(
    name="host",
    skeleton=Path("/state/images/host-1"),
    binds=(Bind(Path("/usr"), "/usr"),),
    masks=("/usr/local",),
    writable=("/workspace",),
    shell="/bin/bash",
    env=MappingProxyType({}),
)


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Plans look programs up; what is installed here does not matter."""
    place = tmp_path_factory.mktemp("bin")
    for name in ("bwrap", "crun", "runc"):
        (place / name).write_text("")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(place))


def a_blueprint(**changes: object) -> Blueprint:
    fields: dict[str, object] = {
        "id": "sbx-1",
        "image": IMAGE,
        "limits": settle(Asked(), frozenset({"cpu", "memory", "pids", "disk"})),
        "owner_uid": 600_000,
        "privileged": True,
        "cgroups": (Path("/sys/fs/cgroup/memory/dockyard/key/sbx-1"),),
        "born_in": Path("/sys/fs/cgroup/unified/dockyard/key/sbx-1"),
        "pids_by_rlimit": False,
        "protections": Policy().protections,
        "profile": None,
        "hide_unified": Path("/sys/fs/cgroup/unified"),
    }
    return Blueprint(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def init_words(plan: LaunchPlan) -> tuple[str, ...]:
    return plan.program[plan.program.index("/.dockyard/init") + 1 :]


@pytest.mark.parametrize("name", ["function", "container"])
def test_every_plan_joins_its_cgroups_and_bounds_its_layer(name: str):
    options = find_substrate(name).plan(a_blueprint()).options
    for pair in [
        ("--cgroup", "/sys/fs/cgroup/memory/dockyard/key/sbx-1"),
        ("--layer-bytes", str(256 << 20)),
        ("--mask", "/usr/local"),
        ("--writable", "/workspace"),
        ("--owner", "600000"),
    ]:
        assert pair in pairwise(options)
    assert "--userns" not in options
    assert find_substrate(name).plan(a_blueprint()).born_in == a_blueprint().born_in


@pytest.mark.parametrize("name", ["function", "container"])
def test_a_layer_that_is_not_in_memory_leaves_a_small_stage_there(name: str):
    limits = settle(Asked(disk_mb=512), frozenset({"cpu", "memory", "pids", "disk"}), layer="image")
    plan = find_substrate(name).plan(a_blueprint(limits=limits))
    assert ("--layer-bytes", str(1 << 20)) in pairwise(plan.options)
    assert ("--layer-inodes", "64") in pairwise(plan.options)


@pytest.mark.parametrize("name", ["function", "container"])
def test_a_forks_name_is_the_kernels_and_in_its_hosts(name: str):
    plan = find_substrate(name).plan(a_blueprint(hostname="dockyard-1", is_filled=True))
    assert ("--host", "dockyard-1") in pairwise(plan.options)
    told = json.loads(plan.oci_config)["hostname"] if plan.oci_config else plan.program
    assert "dockyard-1" in told
    assert "--host" not in find_substrate(name).plan(a_blueprint()).options
    assert ("--host", "dockyard") in pairwise(find_substrate(name).plan(a_blueprint(is_filled=True)).options)


def test_function_drops_to_the_sandboxs_uid_before_bubblewrap():
    plan = find_substrate("function").plan(a_blueprint())
    assert "--drop" in plan.options
    assert Path(plan.program[0]).name == "bwrap"
    assert {"--unshare-user", "--unshare-pid", "--disable-userns"} <= set(plan.program)
    assert init_words(plan) == ("init", "3", "sbx-1", "0", "0", "-", "/workspace", "/dev/shm")
    assert ("--seccomp", "4") in pairwise(plan.program)
    assert ("/tmp/pts", "/dev/pts") in pairwise(plan.program)
    assert ("--terminals", "64") in pairwise(plan.options)
    assert plan.filter_program


def test_without_privilege_function_makes_a_user_namespace_and_limits_by_rlimit():
    limits = settle(Asked(pids=40), frozenset({"pids", "disk"}))
    plan = find_substrate("function").plan(
        a_blueprint(
            privileged=False, cgroups=(), born_in=None, pids_by_rlimit=True, limits=limits, owner_uid=0
        )
    )
    assert "--userns" in plan.options
    assert "--drop" not in plan.options
    assert init_words(plan)[3:5] == ("40", str(512 << 20))


def test_crun_leaves_cgroups_alone_and_sees_one_version():
    plan = find_substrate("container").plan(a_blueprint(runtime="crun"))
    assert "--cgroup-manager=disabled" in plan.program
    assert ("--ids", "65536") in pairwise(plan.options)
    assert ("--hide", "/sys/fs/cgroup/unified") in pairwise(plan.options)
    assert plan.oci_config is not None
    assert "cgroupsPath" not in json.loads(plan.oci_config)["linux"]
    assert not plan.all_hierarchies


@pytest.mark.parametrize(
    ("name", "privileged", "kind", "stays", "layer_at"),
    [
        ("container", True, "memory", False, "fd/5"),
        ("container", False, "memory", True, "fd/5"),
        ("function", True, "memory", True, "root/tmp/upper"),
        ("function", True, "image", True, "root/tmp/layer/upper"),
    ],
)
def test_a_runtime_goes_where_nobody_needs_what_it_leaves(
    name: str, privileged: bool, kind: str, stays: bool, layer_at: str
):
    limits = settle(Asked(), frozenset({"cpu", "memory", "pids", "disk"}), layer=kind)  # pyright: ignore
    plan = find_substrate(name).plan(a_blueprint(privileged=privileged, limits=limits))
    assert (plan.stays, plan.layer_at) == (stays, layer_at)


def test_runc_makes_its_cgroups_below_the_sandboxs():
    plan = find_substrate("container").plan(a_blueprint(runtime="runc"))
    assert plan.oci_config is not None
    assert json.loads(plan.oci_config)["linux"]["cgroupsPath"] == "/dockyard/key/sbx-1/runtime"
    assert plan.all_hierarchies


@pytest.mark.parametrize(("filtered", "as_program"), [(True, True), (True, False), (False, True)])
def test_a_runtime_that_takes_it_gets_the_table_as_a_program_too(filtered: bool, as_program: bool):
    config = oci_config(["/init"], owner_uid=600_000, cgroup=None, filtered=filtered, as_program=as_program)
    programs = [base64.b64decode(each) for each in config["annotations"].values()]
    assert programs == ([filter_program(this_machine())] if filtered and as_program else [])
    table = config["linux"].get("seccomp")
    beside = oci_beside_program() if as_program else oci_seccomp(this_machine())
    assert table == (beside if filtered else None)


def test_the_oci_process_has_no_power():
    config = oci_config(["/init"], owner_uid=600_000, cgroup=None)
    assert all(not granted for granted in config["process"]["capabilities"].values())
    assert config["process"]["noNewPrivileges"] is True
    assert {"type": "user", "path": "/tmp/user"} in config["linux"]["namespaces"]
    assert {each["type"] for each in config["linux"]["namespaces"]} == {
        *("pid", "mount", "ipc", "uts", "cgroup", "user")
    }
    assert config["linux"]["uidMappings"] == [{"containerID": 0, "hostID": 600_000, "size": 65536}]
    assert "/proc/kcore" in config["linux"]["maskedPaths"]
    rules = config["linux"]["seccomp"]["syscalls"]
    allowed = {name for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert not {"mount", "bpf", "keyctl", "io_uring_setup", "unshare"} & allowed


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match="'vm' is unknown") as caught:
        find_substrate("vm")
    assert "'function' or 'container'" in caught.value.hint


def test_a_missing_runtime_is_named():
    """With how to have it, which is not another by name."""
    with pytest.raises(UnsupportedError, match="runtime='no-such-runtime' is no program") as caught:
        find_runtime("no-such-runtime")
    assert caught.value.hint == "install it, or leave it out for crun or runc"


def test_a_container_without_root_has_one_id_and_hides_cgroups_from_crun():
    find_substrate("container").check(privileged=False, runtime=None)
    blueprint = a_blueprint(
        privileged=False, cgroups=(), pids_by_rlimit=True, owner_uid=0, num_ids=1, runtime="crun"
    )
    plan = find_substrate("container").plan(blueprint)
    assert "--userns" in plan.options
    assert ("--ids", "1") in pairwise(plan.options)
    assert ("--hide", "/sys/fs/cgroup") in pairwise(plan.options)
    assert plan.oci_config is not None
    ids = json.loads(plan.oci_config)["linux"]["uidMappings"]
    assert ids == [{"containerID": 0, "hostID": 0, "size": 1}]


@pytest.mark.parametrize("name", ["function", "container"])
def test_what_is_adopted_has_ids_of_its_own_in_a_user_namespace(name: str):
    plan = find_substrate(name).plan(a_blueprint(privileged=False, cgroups=(), owner_uid=1, is_adopted=True))
    assert "--userns" in plan.options
    assert ("--owner", "1") in pairwise(plan.options)
    assert ("--drop" in plan.options) == (name == "function")
    assert (("--ids", "65536") in pairwise(plan.options)) == (name == "container")


def test_runc_without_root_makes_cgroups_where_it_may():
    plan = find_substrate("container").plan(a_blueprint(privileged=False, owner_uid=1, runtime="runc"))
    assert plan.oci_config is not None
    assert "cgroupsPath" not in json.loads(plan.oci_config)["linux"]
    assert not plan.all_hierarchies


def test_function_takes_no_runtime():
    with pytest.raises(UnsupportedError, match="runtime='crun'"):
        find_substrate("function").check(privileged=True, runtime="crun")


def test_missing_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="needs bubblewrap"):
        find_substrate("function").check(privileged=True, runtime=None)


def test_an_image_needs_init_and_toolkit(tmp_path: Path):
    init = tmp_path / "init"
    with pytest.raises(UnsupportedError, match=r"sandbox\.native\.build"):
        prepare_image("host", state_dir=tmp_path, init=init, toolkit=tmp_path)
    init.write_bytes(b"")
    with pytest.raises(UnsupportedError, match="no toolkit at") as caught:
        prepare_image("host", state_dir=tmp_path, init=init, toolkit=tmp_path / "absent")
    assert f"--into {tmp_path / 'absent'}" in caught.value.hint
    with pytest.raises(InvalidArgument, match="image='debian' is unknown"):
        prepare_image("debian", state_dir=tmp_path, init=init, toolkit=tmp_path)


@pytest.mark.parametrize("name", ["function", "container"])
def test_a_protection_is_left_out_where_the_policy_says_so(name: str):
    def words(*without: Protection) -> str:
        protections = Policy(without=frozenset(without)).protections
        plan = find_substrate(name).plan(a_blueprint(protections=protections))
        filtered = "filter" if plan.filter_program else ""
        return f"{' '.join(plan.program)} {plan.oci_config} {filtered}"

    assert "/dev/shm" in words()
    assert ("seccomp" in words(), "seccomp" in words("seccomp")) == (True, False)
    assert "filter" not in words("seccomp")
    if name == "function":
        assert "/workspace /dev/shm" not in words("landlock")


def test_a_policy_refuses_what_it_does_not_know():
    with pytest.raises(InvalidArgument, match="network"):
        Policy(network="open")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="colour"):
        Policy(colour="red")  # pyright: ignore[reportCallIssue]


def test_folders_of_proc_are_covered_by_the_images_empty_one_where_the_runtime_binds_there():
    """crun does; runc refuses to mount below /proc, and has them in its list."""
    places = {f"/proc/{name}" for name in ("acpi", "asound", "scsi") if Path("/proc", name).is_dir()}
    by_crun = oci_config(["/init"], owner_uid=600_000, cgroup=None, as_program=True)
    bound = {each["destination"]: each for each in by_crun["mounts"] if each["type"] == "bind"}
    assert bound.keys() == places
    assert all(
        "ro" in each["options"] and each["source"].endswith("/.dockyard/empty") for each in bound.values()
    )
    by_runc = oci_config(["/init"], owner_uid=600_000, cgroup=None)
    assert places <= set(by_runc["linux"]["maskedPaths"])
    assert places.isdisjoint(by_crun["linux"]["maskedPaths"])
