"""A process is told apart from the next one of its pid, and from what only looks dead."""

import subprocess
import sys

from sandbox_places import no_descriptor_left

from sandbox.processes import ProcessKey, find_process, this_process

# Its first thread leaves by the system call for one thread; the other ends with standard input.
HEADLESS = """
import ctypes, sys, threading
def wait():
    while ") Z " not in open("/proc/self/stat").read():
        pass
    print("headless", flush=True)
    sys.stdin.read()
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_process_without_its_first_thread_is_alive_and_can_be_killed():
    with subprocess.Popen(
        [sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"headless\n"
        key = find_process(process.pid)
        assert key is not None
        assert key.is_alive()
        assert key.kill()
        assert process.wait() == -9
    assert not key.is_alive()


def test_a_zombie_is_not_alive_and_another_start_time_is_another_process():
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        key = find_process(process.pid)
        assert key is not None
        assert process.stdout is not None
        process.stdout.read()  # ends with it, a moment before it is a zombie
        assert key.ends_within(30)
        assert not key.is_alive()
        assert find_process(process.pid) == key
        assert not key.kill()
    this = this_process()
    assert this.is_alive()
    assert not this.ends_within(0)
    with no_descriptor_left():
        assert not this.ends_within(0)  # as far as is known
    assert not ProcessKey(this.pid, this.start_ticks + 1).is_alive()
