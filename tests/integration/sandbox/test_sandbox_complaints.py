"""What users of other sandboxes complain of: a test a complaint, named after it.

Those that other files hold, in the words of the complaint:
- a sandbox vanishes and the error says timeout: test_when_init_dies_the_command_is_lost_and_all_is_freed;
- exec on a paused sandbox fails: test_whatever_is_asked_of_it_ends_the_pause;
- a cancelled create leaves a sandbox: test_a_cancelled_create_leaves_no_sandbox;
- an empty environment wipes PATH: test_an_empty_environment_keeps_the_path;
- a failed create leaves directories: test_a_refused_create_leaves_nothing and its neighbours;
- prompts, quotes, heredocs and terminals mangle output: test_sandbox_torture.py, test_sandbox_sessions.py;
- output limits keep everything, or nothing: test_output_beyond_the_cap_keeps_head_and_tail, torture;
- a failed snapshot passes for one, or its sandbox ends meanwhile: test_sandbox_snapshot_refusals.py;
- HTTP is denied and DNS carries it out: test_other_names_are_never_asked_for;
- a host of an error while writing rules is open: test_a_program_that_cannot_be_attached_refuses_the_sandbox;
- rules that cannot be written, or find no room, are silently no rules: test_sandbox_full_maps.py, attack 87;
- a loopback that is allowed is the host's: test_the_loopback_is_the_sandboxs_own;
- keys are typed into another's terminal: attacks 23;
- the runtime owns the host's devices: test_the_hosts_devices_stay_the_hosts.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_internet import HOST, OTHER, WEB, attempt

from sandbox import Sandbox
from sandbox.errors import InvalidArgument, SandboxError, SandboxGone, UnsupportedError
from sandbox.journal import Journal

Create = Callable[..., Sandbox]
BOUNDED = pytest.mark.timeout(60)  # what others complain of takes for ever
TRAPS = "trap '' TERM INT HUP QUIT; while :; do sleep 1000; done"


def init_of(box: Sandbox, state_dir: Path) -> int:
    """Its pid on this host."""
    (record,) = (each for each in Journal(state_dir).records() if each.id == box.id)
    return record.processes[-1].pid


def test_a_sandbox_that_vanished_is_lost_and_no_timeout(create: Create, substrate: str, state_dir: Path):
    box = create(substrate=substrate)
    running = box.commands.start("sleep 1000", timeout_s=600)
    os.kill(init_of(box, state_dir), signal.SIGKILL)
    assert running.wait(60).reason == "lost"
    for ask in (lambda: box.commands.run("true"), lambda: box.files.list("/"), box.pause):
        with pytest.raises(SandboxGone) as gone:
            ask()
        assert gone.value.reason == "lost"
        assert "timeout" not in str(gone.value)


def test_after_a_resume_it_is_there_at_once(box: Sandbox):
    for number in range(8):
        box.pause()
        box.resume()
        assert box.is_running
        assert box.commands.run(f"echo {number}").stdout == f"{number}\n"


def test_looking_does_not_change_how_long_it_lives(create: Create):
    """Nor does finding a command again, or a new policy: the lifetime is counted from the create."""
    box = create(lifetime_s=2.0, idle_s=600.0)
    running = box.commands.start("sleep 1000")
    while running.is_running:
        assert (box.info.limits.lifetime_s, box.info.limits.idle_s) == (2.0, 600.0)
        with suppress(InvalidArgument, TimeoutError):  # it may have ended just now
            box.commands.connect(running.id).wait(0.05)
    assert running.wait(60).reason == "killed"
    with pytest.raises(SandboxGone) as gone:
        box.commands.run("true")
    assert gone.value.reason == "expired"


@BOUNDED
def test_what_traps_every_signal_stops_at_once(box: Sandbox):
    commands = [box.commands.start(TRAPS) for _ in range(4)]
    box.commands.run("true")
    commands[0].kill()
    assert commands[0].wait().reason == "killed"
    box.kill()
    assert {each.wait().reason for each in commands} == {"killed"}


@BOUNDED
def test_a_server_in_the_foreground_does_not_stall_its_caller(box: Sandbox):
    result = box.commands.run("echo listening; exec sleep 1000", timeout_s=0.5)
    assert (result.reason, result.stdout) == ("timeout", "listening\n")
    server = box.commands.start("python3 -m http.server 8000 --bind 127.0.0.1", stdin="")
    asked = box.commands.run(
        "until exec 3<>/dev/tcp/127.0.0.1/8000; do sleep 0.05; done; "
        "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -1 <&3"
    )
    assert "200 OK" in asked.stdout
    assert server.is_running


def test_one_of_many_creates_that_fails_says_why_and_the_others_live(create: Create, substrate: str):
    """Side by side, with the cause, and not by way of a counter."""
    made: list[Sandbox] = []
    errors: list[SandboxError] = []
    lock = threading.Lock()

    def make(number: int) -> None:
        try:
            box = create(substrate=substrate, image="nobody's" if number == 7 else "host")
        except SandboxError as error:
            with lock:
                errors.append(error)
            return
        with lock:
            made.append(box)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.commands.run("echo up").stdout for each in made] == ["up\n"] * 23
    (error,) = errors
    assert "nobody's" in error.message
    assert error.hint


@BOUNDED
def test_nothing_but_the_host_is_needed_to_end_one(create: Create, substrate: str, state_dir: Path):
    """Not a descriptor, nor the sandbox's own help: init is stopped, so it answers nothing."""
    box = create(substrate=substrate)
    running = box.commands.start("sleep 1000")
    os.kill(init_of(box, state_dir), signal.SIGSTOP)
    box.kill()
    assert running.wait().reason == "killed"


def test_nobody_in_the_sandbox_can_stop_what_enforces_its_policy(connect, substrate: str):
    """Its root kills all that it can, and takes down all links that it may."""
    box = connect(WEB, substrate=substrate)
    box.commands.run("ip link set eth0 down; ip route flush table all; iptables -F; nft flush ruleset")
    box.commands.run("kill -9 -1")
    reached, denials = attempt(box, f"tcp('{HOST}', 80)", f"tcp('{OTHER}', 80)")
    assert reached == ["hello", "EPERM"]
    assert {each.address for each in denials} == {OTHER}


def test_rules_hold_for_programs_that_heed_no_proxy(connect, substrate: str, monkeypatch):
    """They are the kernel's, and no variable of the environment is among them."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://{OTHER}:80")
    box = connect(WEB, substrate=substrate)
    said = box.commands.run(f"env | grep -i proxy; exec 3<>/dev/tcp/{OTHER}/80", env={})
    assert (said.ok, said.stdout) == (False, "")
    assert "Operation not permitted" in said.stderr


def test_a_wildcard_does_not_switch_the_default_off(connect, internet):
    box = connect(names=({"domains": ["*.example.org"], "ports": [80]},))
    internet.names = {"a.example.org": [HOST], "example.net": [OTHER]}
    reached, _ = attempt(box, "tcp('a.example.org', 80)", f"tcp('{OTHER}', 80)", f"udp('{HOST}', 5000)")
    assert reached == ["hello", "EPERM", "EPERM"]


def test_a_host_without_the_tools_says_so_and_goes_without_nothing(create: Create, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for substrate, tool in (("function", "bubblewrap"), ("container", "crun")):
        with pytest.raises(UnsupportedError) as refused:
            create(substrate=substrate)
        assert tool in f"{refused.value.message} {refused.value.hint}"
