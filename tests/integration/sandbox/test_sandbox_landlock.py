"""Landlock: what it refuses is refused by it alone, as the same sandbox without it shows."""

from sandbox import Policy
from sandbox.policy import landlock

# What modes, mounts and the filter of calls let through: the process's own name, and its score.
OWN_FILES = ["/proc/self/comm", "/proc/self/oom_score_adj"]


def write_to(box, path):
    return box.commands.run(f"echo 0 > {path}")


def test_writes_outside_the_writable_directories_are_refused(create, substrate):
    box = create(substrate=substrate)
    for path in OWN_FILES:
        result = write_to(box, path)
        assert result.exit_code != 0
        assert "Permission denied" in result.stderr


def test_without_it_the_same_writes_succeed(create, substrate):
    box = create(substrate=substrate, policy=Policy(without=frozenset({"landlock"})))
    assert "landlock is off, as asked" in box.info.limits.degraded
    for path in OWN_FILES:
        assert write_to(box, path).ok, path


def test_what_programs_write_is_open(create, substrate):
    """Files of every kind in every writable directory, moves between two, devices, terminals, pipes."""
    script = """set -e
for place in /workspace /tmp /root /var/tmp /dev/shm; do
  mkdir -p $place/d; echo a > $place/d/f; ln -s f $place/d/l; mkfifo $place/d/p; truncate -s 9 $place/d/f
done
mv /workspace/d/f /tmp/d/moved; ln /tmp/d/moved /tmp/d/hard; rm -r /root/d
echo b > /dev/null; echo c > /dev/stdout; echo e > /dev/stderr
python3 -c 'import pty; pty.spawn(["true"])'
"""
    result = create(substrate=substrate).commands.run(script)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "c\n", "e\n")


def test_commands_share_one_domain(create, substrate):
    """One command looks into another and ends it, as between processes of one machine."""
    box = create(substrate=substrate)
    server = box.commands.start("sleep 60")
    found = box.commands.run(
        "until pid=$(pgrep -x sleep); do :; done; ls /proc/$pid/fd >/dev/null && kill $pid"
    )
    assert found.ok, found.stderr
    assert server.wait().reason == "signal"


def test_this_kernel_says_its_version():
    assert landlock.abi() >= 1
