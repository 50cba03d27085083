"""AppArmor by a kernel that has it: what it denies is denied by it, as the same sandbox without it shows."""

from pathlib import Path

from sandbox import Policy
from sandbox.places import default_state_dir
from sandbox.policy.apparmor_profiles import LoadedProfiles

LOADED = Path("/sys/kernel/security/apparmor/profiles")
PLACES = Policy(protected=("/workspace/tests",), hidden=("/workspace/answers", "/workspace/a key*"))
OFF = frozenset({"apparmor"})


def loaded():
    return {line.split()[0] for line in LOADED.read_text().splitlines() if line.startswith("dockyard-")}


def filled(box):
    """Files in protected and hidden places, and beside them."""
    box.commands.run("mkdir -p tests answers; touch 'a key*' 'a key2'; echo ok > beside")
    return box


def tried(box, command):
    return box.commands.run(command, timeout_s=120)


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


def test_equal_policies_share_a_profile_that_goes_with_its_last_user(create):
    profiles = LoadedProfiles(default_state_dir())
    assert loaded() == set()
    first, second, other = create(), create(), create(policy=PLACES)
    assert loaded() == {first.info.profile, other.info.profile}
    assert profiles.users()[first.info.profile] == {first.id, second.id}
    first.kill()
    other.kill()
    assert loaded() == {second.info.profile}
    second.kill()
    assert loaded() == set()


def test_a_program_cannot_leave_its_profile(create):
    box = create()
    for target in ("unconfined", "dockyard-other"):
        done = tried(box, f"echo 'changeprofile {target}' > /proc/self/attr/current")
        assert done.exit_code != 0
