"""What counts leaks sees a leak."""

import subprocess

from machine_counts import grown, take


def test_a_child_that_nobody_waited_for_is_counted_until_somebody_does():
    before = take()
    child = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.read()  # the end of its output is a moment before its own
    while take()["zombies"] == before["zombies"]:
        pass
    assert grown({"zombies": before["zombies"]}, take()) == {"zombies": 1}
    child.wait()
    assert take()["zombies"] == before["zombies"]
