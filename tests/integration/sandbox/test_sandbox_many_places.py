"""As many places as a policy may name, of all fields that a substrate mounts."""

from itertools import islice
from pathlib import Path

from sandbox import Policy
from sandbox.policy.document import MAX_PLACES

AT = Path("/usr")


def folders(count: int) -> list[str]:
    """Of the image, none in another one and none reached by a link."""
    found = (
        each
        for above in ("share", "lib", "include")
        for each in sorted((AT / above).glob("*/"))
        if not each.is_symlink() and str(each).isprintable() and "python" not in each.name
        and not each.name.endswith("-linux-gnu") and each.name not in ("locale", "terminfo", "zoneinfo")
    )  # fmt: skip
    return [str(each) for each in islice(found, count)]


def test_all_that_a_policy_allows_is_covered_together(create, substrate: str):
    places = folders(2 * MAX_PLACES)
    assert len(places) == 2 * MAX_PLACES
    masked, read_only = places[:MAX_PLACES], places[MAX_PLACES:]
    policy = Policy(masked=tuple(masked), read_only=tuple(read_only), devices=frozenset({"null"}))
    env = {f"NAME_{number}": "x" * 1000 for number in range(64)}
    box = create(substrate=substrate, policy=policy, env=env)
    shown = box.commands.run(["find", *masked, "-mindepth", "1"])
    assert (shown.stdout, shown.exit_code) == ("", 0)
    assert box.commands.run(["ls", "-A", *read_only]).ok
    assert box.commands.run("echo ${#NAME_63}").stdout == "1000\n"
