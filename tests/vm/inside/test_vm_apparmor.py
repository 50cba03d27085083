"""AppArmor by a kernel that has it: what it denies is denied by it, as the same sandbox without it shows."""

import subprocess
from pathlib import Path

import pytest

from sandbox import Policy
from sandbox.cgroups import state_key
from sandbox.places import default_state_dir
from sandbox.policy.apparmor_profiles import LoadedProfiles

LOADED = Path("/sys/kernel/security/apparmor/profiles")
PLACES = Policy(protected=("/workspace/tests",), hidden=("/workspace/answers", "/workspace/a key*"))
OFF = frozenset({"apparmor"})
DEEP = Policy(
    protected=("/workspace/tests", "/workspace/a/b/tests"),
    hidden=("/workspace/answers", "/workspace/a key*", "/workspace/a/b/answers"),
)
KEPT = """
mkdir -p tests answers a/b/tests a/b/answers
for each in tests/x answers/x 'a key*' a/b/tests/x a/b/answers/x a/b/beside; do echo kept > "$each"; done
"""
READS = (
    *("cat answers/x", "cat 'a key*'", "ls answers", "cat a/b/answers/x", "cat /proc/self/cwd/answers/x"),
    *("cp -r answers there", "ln answers/x there && cat there", "mv answers there && cat there/x"),
    *("mv a/b there && cat there/answers/x", "mv a there && cat there/b/answers/x"),
    "ln -s a/b/answers there && cat there/x",
)
WRITES = (
    *("echo x >> tests/x", "echo x > tests/x", "rm tests/x", "touch tests/new", "chmod 600 tests/x"),
    *("truncate -s 0 tests/x", "ln tests/x there && echo x >> there", "ln a/b/beside tests/there"),
    *("mv tests/x there", "mv tests there", "mv a/b/beside tests/x", "echo x >> a/b/tests/x"),
    *("mv a/b there && echo x >> there/tests/x", "mv a there && echo x >> there/b/tests/x"),
    *("mv a/b a/c && mkdir -p a/b/tests && echo x > a/b/tests/x", "mv a there && ln -s there a"),
    *("chmod 700 a/b", "ln -s /tmp/none a/b/tests/there"),
)


def loaded():
    return {line.split()[0] for line in LOADED.read_text().splitlines() if line.startswith("dockyard-")}


def filled(box):
    """Files in protected and hidden places, and beside them."""
    box.commands.run("mkdir -p tests answers; touch 'a key*' 'a key2'; echo ok > beside")
    return box


def tried(box, command):
    return box.commands.run(command, timeout_s=120)


@pytest.fixture
def kept(create):
    """A snapshot with files in the places, made where nothing denies it."""
    box = create(policy=Policy(without=OFF))
    assert tried(box, KEPT).ok
    snapshot = box.snapshot()
    box.kill()
    yield snapshot
    snapshot.delete()


def test_the_sandbox_is_under_its_profile(create):
    box = create()
    assert box.info.lacking == ()
    assert tried(box, "cat /proc/self/attr/current").stdout.startswith(box.info.profile)
    assert "(enforce)" in tried(box, "cat /proc/self/attr/current").stdout


def test_protected_places_are_read_and_not_written(create):
    box = create(policy=PLACES)
    for command in ("mkdir tests", "touch tests/x", "echo x > tests", "ln -s /tmp tests", "mv beside tests"):
        assert tried(box, command).exit_code != 0, command
    assert tried(box, "ls / >/dev/null; touch testsuite && mkdir -p other/tests && touch other/tests/x").ok


def test_hidden_places_are_neither(create):
    box = create(policy=PLACES)
    for command in ("mkdir answers", "touch 'a key*'", "touch answers/x"):
        assert tried(box, command).exit_code != 0, command
    assert tried(box, "touch 'a key2'").ok


def test_without_it_the_same_is_done(create):
    box = create(policy=Policy(without=OFF))
    assert box.info.profile is None
    assert tried(box, "mkdir tests answers && touch tests/x answers/x 'a key*'").ok


def test_what_lies_in_hidden_places_is_not_read(create, kept):
    box = create(policy=DEEP, snapshot=kept)
    opened = [command for command in READS if tried(box, f"rm -rf there; {command}").exit_code == 0]
    assert opened == []


def test_what_lies_in_protected_places_is_read_and_stays(create, kept):
    box = create(policy=DEEP, snapshot=kept)
    opened = [command for command in WRITES if tried(box, f"rm -rf there; {command}").exit_code == 0]
    assert opened == []
    assert not tried(box, "mv /workspace /tmp/there").ok
    assert not tried(box, "mv /workspace /there").ok
    assert tried(box, "cat tests/x a/b/tests/x").stdout == "kept\nkept\n"
    assert tried(box, "echo x > a/b/beside; mkdir a/b/new && mv a/b/new a/b/other && rm -r a/b/other").ok


def test_without_the_places_all_of_that_is_done(create, kept):
    """Each in a copy: they undo one another."""
    box = create(snapshot=kept)
    copied = "rm -rf /tmp/copy && cp -a /workspace /tmp/copy && cd /tmp/copy && "
    shut = [command for command in (*READS, *WRITES) if not tried(box, copied + command).ok]
    assert shut == []


def test_parents_of_places_are_not_made_in_another_way(create):
    """Or what is made elsewhere would be moved there."""
    box = create(policy=DEEP)
    for command in ("mkdir a", "touch a", "ln -s /tmp a", "mkdir -p c/b/tests && mv c a"):
        assert tried(box, command).exit_code != 0, command
    assert tried(box, "mkdir -p c/a/b/tests && touch ab").ok


def test_equal_policies_share_a_profile_that_goes_with_its_last_user(create):
    state = default_state_dir()
    profiles = LoadedProfiles(state, state_key(state))
    assert loaded() == set()
    first, second, other = create(), create(), create(policy=PLACES)
    assert loaded() == {first.info.profile, other.info.profile}
    assert profiles.users()[first.info.profile] == {first.id, second.id}
    first.kill()
    other.kill()
    assert loaded() == {second.info.profile}
    second.kill()
    assert loaded() == set()


def test_a_profile_that_somebody_unloads_is_loaded_for_the_next(create):
    """As after a restart of the machine: files say that it is in use, and it is not there."""
    name = create().info.profile
    words = ["apparmor_parser", "--remove", "--skip-cache"]
    subprocess.run(words, input=f"profile {name} {{}}\n", text=True, check=True)
    assert loaded() == set()
    assert create().commands.run("true").ok
    assert loaded() == {name}


def test_a_program_cannot_leave_its_profile(create):
    box = create()
    for target in ("unconfined", "dockyard-other"):
        done = tried(box, f"echo 'changeprofile {target}' > /proc/self/attr/current")
        assert done.exit_code != 0
