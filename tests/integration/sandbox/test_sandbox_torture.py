"""Scripts and output that mangle what they pass through: all of it comes back byte for byte, or capped with
its head, its tail and a marker between, at no cost to the owner's memory."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_results import resident_mib

from sandbox import Policy, Sandbox

MIB = 1 << 20
CAP_BYTES = MIB
MAX_GROWTH_MIB = 24.0  # for any length: a few caps

# What is passed on, as a shell reads it between single quotes.
PAYLOADS = (
    *(
        "plain",
        "two  spaces ",
        "$HOME `echo a` $(echo b) ${x:-y}",
        'a"b"c',
        "back\\slash \\n \\\\",
        "tab\there",
    ),
    *("line\nbreak", "\x1b[31mred\x1b[0m\x07", "\u00fc\u4f60\U0001f600", "%s %d %%", "! !! !$ ^a^b"),
    *("* ? [a-z] {1,2} ~", "# no comment", "PS1> $ # >>> ", "; && || | & < > >>", "\r\rover\x08written"),
    *("-n -e --", "EOF\nEND\nEOF", "", " ", "\u2028\u00a0\ufeff"),
)
# Ways to pass it on; each prints, and none depends on where it runs.
FORMS = (
    "printf '%s' {quoted}",
    "printf '%s\\n' {quoted} | cat | cat",
    "x={quoted}; printf '%s' \"$x\" >&2; printf '%s' \"${{#x}}\"",
    "cat <<'Q1'\n{raw}\nQ1\n",
    "cat <<-'Q1' | od -An -tx1\n\t{raw}\n\tQ1\n",
    "f() {{ printf '[%s]' \"$@\"; }}\nf {quoted} {quoted}",
    'bash -c \'printf "%s" "$1"\' bash {quoted}',
    "eval \"printf '%s' \"{quoted}",
    "while IFS= read -r line; do printf '%s.' \"$line\"; done <<'Q1'\n{raw}\nQ1",
    "python3 -c 'import sys; sys.stdout.write(repr(sys.argv[1:]))' {quoted}",
)
# Not bash as it should be: what bash says to it is passed on too.
BROKEN = (
    *(
        "echo 'never closed",
        'echo "never closed',
        "cat <<EOF\nno end",
        "if true; then",
        "echo $(",
        "}",
        ")",
        "|",
    ),
    *("case x in", "f() {", "echo a; ; echo b", "exit 300", "kill -9 $$", "exec /nowhere", "\0", "\\"),
)


def corpus() -> Iterator[str]:
    for payload in PAYLOADS:
        quoted = "'" + payload.replace("'", "'\\''") + "'"
        yield from (form.format(quoted=quoted, raw=payload) for form in FORMS)


def on_the_host(script: str, empty: Path) -> tuple[int, bytes, bytes]:
    """The same shell and surroundings, without a sandbox; `empty` is where it starts."""
    path = "/opt/dockyard/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": path}
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, check=False, env=env, cwd=empty)
    return done.returncode % 256, done.stdout, done.stderr


def in_the_sandbox(box: Sandbox, script: str) -> tuple[int | None, bytes, bytes]:
    done = box.commands.run(script, cwd="/var/tmp", env={"LANG": "C.UTF-8"})
    code = done.exit_code if done.reason == "exit" else -((done.exit_code or 0) - 128) % 256
    return code, done.stdout_bytes, done.stderr_bytes


def test_scripts_print_what_they_print_without_a_sandbox(box: Sandbox, tmp_path: Path):
    scripts = list(corpus())
    assert len(scripts) >= 200
    for script in scripts:
        assert in_the_sandbox(box, script) == on_the_host(script, tmp_path), script


def test_broken_scripts_fail_as_they_fail_without_a_sandbox(box: Sandbox, tmp_path: Path):
    for script in (each for each in BROKEN if "\0" not in each):
        assert in_the_sandbox(box, script) == on_the_host(script, tmp_path), script


def test_every_script_leaves_a_session_as_it_was(box: Sandbox):
    """A prompt would have been lost at the first unclosed quote."""
    session = box.sessions.create()
    session.run("kept='it is'; cd /tmp")
    for script in (*BROKEN[:14], *list(corpus())[::9]):
        session.run(script)
    assert session.run('printf "%s|%s" "$kept" "$PWD"').stdout == "it is|/tmp"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_every_byte_comes_back_in_every_place(box: Sandbox, stream: str):
    """NUL, invalid UTF-8, half a character at the end of each piece of output."""
    data = b"".join(bytes([first, second]) for first in range(256) for second in range(256)) + b"\xe4\xbd"
    box.files.write("data", data)
    done = box.commands.run("cat data" if stream == "stdout" else "cat data >&2")
    assert (done.stdout_bytes if stream == "stdout" else done.stderr_bytes) == data
    assert not done.truncated
    assert done.stdout + done.stderr  # text can always be had


ONE_LINE = """
import sys
piece, total = bytes(range(32, 127)).replace(b"\\n", b"") * 1024, int(sys.argv[1])
out = sys.stdout.buffer
out.write(b"first")
for _ in range((total - 10) // len(piece)):
    out.write(piece)
out.write(b"." * ((total - 10) % len(piece)) + b"last.")
"""
LONG = [pytest.mark.soak, pytest.mark.timeout(1_800)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "total", [pytest.param(256 * MIB, id="256M"), pytest.param(1 << 30, id="1G", marks=LONG)]
)
def test_a_line_without_an_end_is_capped_in_flat_memory(create, substrate: str, total: int):
    policy = Policy(output_bytes=CAP_BYTES, output_total_bytes=total + MIB, timeout_s=600.0)
    box = create(substrate=substrate, policy=policy)
    box.commands.run(["python3", "-c", ONE_LINE, str(4 * MIB)])
    before_mib = resident_mib()
    done = box.commands.run(["python3", "-c", ONE_LINE, str(total)])
    assert (done.reason, done.exit_code, done.truncated) == ("exit", 0, True)
    assert done.stdout_bytes.startswith(b"first !\"#$%&'()")
    assert done.stdout_bytes.endswith(b"last.")
    assert len(done.stdout_bytes) < CAP_BYTES + 200
    assert str(total - CAP_BYTES).encode() in done.stdout_bytes  # the marker says how much is missing
    assert resident_mib() - before_mib < MAX_GROWTH_MIB


def test_children_that_hold_the_pipe_hold_nobody_up_and_lose_nothing(box: Sandbox):
    """What was written when the command ended is there; what they would have written is not."""
    script = (
        "for i in $(seq 20); do (exec -a holder sleep 1000) & done; "
        "(trap '' HUP TERM; sleep 1000; echo late) & yes | head -c 300000; echo done"
    )
    done = box.commands.run(script, timeout_s=60)
    assert (done.reason, len(done.stdout_bytes), done.stdout_bytes[-6:]) == ("exit", 300_005, b"\ndone\n")
    assert box.commands.run("pgrep -c sleep").stdout == "0\n"


def test_a_child_that_never_stops_writing_ends_with_its_command(box: Sandbox):
    script = "while echo background; do sleep 0.001; done & sleep 0.2; echo >&2 over"
    done = box.commands.run(script, timeout_s=60)
    assert (done.reason, done.stderr) == ("exit", "over\n")
    assert set(done.stdout.splitlines()) == {"background"}
    assert box.commands.run("pgrep -c sleep").stdout == "0\n"
