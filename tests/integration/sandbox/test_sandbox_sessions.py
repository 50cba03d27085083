"""Shell sessions: what one command leaves, the next finds; and nothing of it can be mangled."""

import asyncio

import pytest

from sandbox import AsyncSandbox, Policy, cgroups
from sandbox.errors import RequestTimeout

unified = next((each for each in cgroups.find_hierarchies() if each.version == 2), None)


@pytest.fixture
def session(box):
    return box.sessions.create(env={"GREETING": "hello"})


def said(result):
    assert result.ok, (result.reason, result.exit_code, result.stderr)
    return result.stdout


def test_directory_variables_functions_and_options_stay(session):
    assert said(session.run("echo $GREETING; pwd")) == "hello\n/workspace\n"
    session.run("mkdir -p 'a b/c'; cd 'a b/c'; x='two  words'; export Y=$'1\\n2'; declare -A m=([k]=v)")
    session.run('f() { echo "f of $1"; }; set -o pipefail; shopt -s nullglob; umask 027')
    assert said(session.run('pwd; echo "$x"; echo "$Y"; echo ${m[k]}; f me')) == (
        "/workspace/a b/c\ntwo  words\n1\n2\nv\nf of me\n"
    )
    assert said(session.run("python3 -c 'import os; print(repr(os.environ[\"Y\"]))'")) == "'1\\n2'\n"
    assert said(session.run("set -o | grep pipefail; shopt nullglob; umask")).split() == [
        "pipefail", "on", "nullglob", "on", "0027",
    ]  # fmt: skip


NAMES = [
    "EPOCHS",
    "SECONDS_LEFT",
    "GROUPS_FILE",
    "SHELLCHECK_OPTS",
    "BASHRC",
    "BASH_ENV_FILE",
    "COMP_DIR",
    "LINENO_OF",
    "RANDOM_SEED",
    "UIDS",
    "PPID_FILE",
    "SHELL",
    "__debug",
    "__line",
    "__state",
    "__code",
    "_x",
    "FUNCNAMES",
    "DIRSTACK_MAX",
]


def test_no_variable_is_taken_for_one_of_the_shells(session):
    said(session.run("; ".join(f"{name}={number}" for number, name in enumerate(NAMES))))
    asked = session.run("; ".join(f'echo "${{{name}-unset}}"' for name in NAMES))
    assert said(asked).split() == [str(number) for number in range(len(NAMES))]


@pytest.mark.parametrize(
    ("cmd", "code", "output"),
    [
        ("v=1; trap 'echo over $?' EXIT; false", 1, "over 1\n"),
        ("v=1; trap 'echo over $?' EXIT; exit 3", 3, "over 3\n"),
        ("v=1; set -e; trap 'echo over $?' 0; false; echo never", 1, "over 1\n"),
        ("v=1; trap 'echo first' EXIT; trap \"echo 'it''s' over; exit 9\" EXIT INT", 9, "its over\n"),
        ("v=1; trap 'echo never' EXIT; trap - EXIT", 0, ""),
        ("v=1; trap 'echo never' EXIT; trap -p EXIT; trap EXIT", 0, "trap -- 'echo never' EXIT\n"),
        ("v=1; (trap 'echo inner' EXIT; v=2; exit 4)", 4, "inner\n"),
        ("v=1; trap 'echo over' EXIT; kept=$(trap -p EXIT); eval \"$kept\"; exit 5", 5, None),
        ("v=1; f() { trap 'echo over' EXIT; }; f; exit 6", 6, "over\n"),
        ("v=1; builtin trap 'echo over' EXIT", 0, "over\n"),
        ("v=1; trap 'echo taken' USR1; kill -USR1 $$; trap nonsense NOSUCH || exit 7", 7, "taken\n"),
    ],
)
def test_a_commands_own_trap_at_its_end_costs_it_nothing(session, cmd, code, output):
    result = session.run(cmd)
    assert result.exit_code == code, result
    assert output is None or result.stdout == output
    assert said(session.run("echo $v")) == "1\n"


def test_commands_at_one_time_leave_the_state_of_one_of_them(session):
    fill = "a={0}; " + " ".join(f"v{number}={{0}};" for number in range(300)) + " set -C; b={0}"
    running = [session.start(fill.format(number)) for number in range(8)]
    assert all(command.wait(60).ok for command in running)
    first, last = said(session.run("echo $a $b")).split()
    assert first == last
    assert said(session.run("ls /dev/shm/.dockyard-sessions")) == f"{session.id}\n"


def test_an_exit_code_comes_back_and_the_state_with_it(session):
    assert session.run("cd /tmp; v=1; exit 7").exit_code == 7
    assert said(session.run("pwd; echo $v")) == "/tmp\n1\n"
    assert session.run("set -e; w=2; false; echo never").exit_code == 1
    assert session.run("false; echo not reached").stdout == ""  # as in a shell with -e
    assert said(session.run("set +e; echo $w")) == "2\n"


def test_an_unclosed_quote_is_its_own_commands_error(session):
    session.run("kept=yes")
    for broken in ("echo 'never closed", "cat <<EOF\nno end", "if true; then", "echo $(", "}"):
        session.run(broken)
        assert said(session.run("echo $kept")) == "yes\n", broken


def test_what_is_ended_leaves_what_was_there(session):
    session.run("n=1; cd /tmp")
    assert session.run("n=2; cd /; sleep 60", timeout_s=0.3).reason == "timeout"
    assert said(session.run("echo $n; pwd")) == "1\n/tmp\n"
    assert said(session.run("n=3; exec echo gone")) == "gone\n"
    assert said(session.run("echo $n")) == "1\n"
    session.run("kill -9 $$")
    assert said(session.run("echo $n")) == "1\n"


def test_two_sessions_share_files_and_nothing_else(box):
    first, second = box.sessions.create(), box.sessions.create(cwd="/tmp")
    first.run("a=1; echo text > /workspace/f")
    assert said(second.run('echo "<$a>"; pwd; cat /workspace/f')) == "<>\n/tmp\ntext\n"


def test_random_numbers_are_not_repeated(session):
    drawn = {said(session.run("echo $RANDOM $RANDOM $RANDOM")) for _ in range(4)}
    assert len(drawn) == 4


def test_input_and_heredocs_pass_through(session):
    assert said(session.run('read -r line; echo "got $line"', stdin="a 'b\" $c\n")) == "got a 'b\" $c\n"
    assert said(session.run("cat <<'EOF'\n$x `y` \\z\nEOF")) == "$x `y` \\z\n"


def test_a_shell_that_is_no_bash_keeps_its_exports_and_directory(box, monkeypatch):
    monkeypatch.setattr(box.commands, "shell", "/bin/sh")
    session = box.sessions.create()
    session.run('mkdir "it\'s"; cd "it\'s"; export A="a \'b"; export B=\'1\n2\'')
    assert said(session.run('pwd; echo "$A"; echo "$B"')) == "/workspace/it's\na 'b\n1\n2\n"
    assert said(session.run("export C=3; trap 'echo over' EXIT")) == "over\n"
    assert said(session.run('echo "$C"')) == "3\n"


def test_sessions_of_asyncio(state_dir, toolkit):
    async def scene():
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            session = await box.sessions.create()
            both = await asyncio.gather(session.run("x=1"), session.run("echo $x"))
            assert both[1].stdout == "1\n"
            began = asyncio.Event()
            slow = asyncio.create_task(session.run("echo; sleep 60", on_stdout=lambda _: began.set()))
            await began.wait()
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            assert await box.commands.list() == ()

    asyncio.run(scene())


def test_a_command_of_an_asyncio_session_is_started_and_waited_for_in_part(state_dir, toolkit):
    async def scene():
        async with await AsyncSandbox.create(state_dir=state_dir, toolkit=toolkit) as box:
            session = await box.sessions.create()
            await session.run("x=1")
            command = await session.start('echo "$x"; read -r y', stdin=None)
            for patience_s in (0, 0.01):
                with pytest.raises(RequestTimeout, match="runs on"):
                    await command.wait(patience_s)
            assert command.is_running
            await command.send_stdin("on\n")
            assert (await command.wait(20)).stdout == "1\n"
            assert (await box.files.stat("/workspace")).type == "dir"

    asyncio.run(scene())


SEEK = "grep -rlE 'canary-[0-9]' /workspace /tmp /var/tmp /root /dev/shm 2> /dev/null | wc -l"


def test_what_a_session_keeps_is_in_no_fork(create, substrate: str):
    if unified is None:
        pytest.skip("no cgroup version 2 here")
    box = create(substrate=substrate, env={"A": "canary-1"})
    session = box.sessions.create(env={"B": "canary-2"})
    assert said(session.run("export C=canary-3; cd /usr")) == ""
    assert said(session.run("echo $PWD $A $B $C")) == "/usr canary-1 canary-2 canary-3\n"
    with box.fork_fs() as fork:
        assert fork.commands.run(SEEK).stdout == "0\n"


def test_a_session_needs_no_place_that_a_policy_may_narrow(create, substrate: str):
    box = create(substrate=substrate, policy=Policy(read_only=("/tmp", "/var/tmp", "/root")))
    session = box.sessions.create()
    assert said(session.run("A=1; cd /usr")) == ""
    assert said(session.run("echo $PWD $A")) == "/usr 1\n"


def test_a_function_that_options_let_be_read_stays(session):
    assert (
        said(session.run("shopt -s extglob\nf() { case $1 in @(a|b)) echo in ;; *) echo out ;; esac; }"))
        == ""
    )
    assert said(session.run("f a; f c")) == "in\nout\n"


def test_a_directory_that_has_gone_is_said_and_costs_nothing_else(box):
    box.files.make_dir("/workspace/first")
    session = box.sessions.create(cwd="first", env={"A": "1"})
    assert (
        said(session.run("mkdir /tmp/next; B=2; pwd; cd /tmp/next; rmdir /tmp/next")) == "/workspace/first\n"
    )
    result = session.run("pwd; echo $A$B")
    assert said(result) == "/workspace/first\n12\n"
    assert result.stderr == (
        "dockyard: /tmp/next cannot be entered: this command starts in /workspace/first\n"
    )
    assert session.run("rm -r /workspace/first").stderr == ""
    result = session.run("pwd; echo $A$B")
    assert (said(result), "starts in /workspace\n" in result.stderr) == ("/workspace\n12\n", True)
    assert session.run("pwd").stderr == ""


def test_the_first_directory_may_go_before_the_first_command(box):
    box.files.make_dir("/workspace/first")
    session = box.sessions.create(cwd="first")
    box.files.remove("/workspace/first")
    result = session.run("pwd")
    assert (said(result), "/workspace/first cannot be entered" in result.stderr) == ("/workspace\n", True)


def test_the_directory_before_this_one_stays(session):
    assert session.run("cd -").exit_code == 1
    session.run("cd /tmp; cd /usr")
    assert said(session.run("echo $OLDPWD; cd -")) == "/tmp\n/tmp\n"
    assert said(session.run("cd -; env | grep PWD | sort")) == "/usr\nOLDPWD=/tmp\nPWD=/usr\n"


def test_a_function_called_as_what_a_session_needs_is_not_called(session):
    said(session.run("cd() { builtin cd /; }; mv() { false; }; rm() { false; }; exec() { false; }; x=1"))
    assert said(session.run("builtin cd /usr; x=2")) == ""
    assert said(session.run("pwd; echo $x")) == "/usr\n2\n"


MUCH = "export A=$(head -c 3000000 /dev/zero | tr '\\0' x); B=1; export B"


@pytest.mark.parametrize("shell", ["", "/bin/sh"])
def test_more_exported_than_a_program_takes_is_kept(box, monkeypatch, shell: str):
    if shell:
        monkeypatch.setattr(box.commands, "shell", shell)
    session = box.sessions.create()
    assert session.run(MUCH).stderr == ""
    assert said(session.run("echo ${#A} $B; cd /usr")) == "3000000 1\n"
    assert said(session.run("pwd; A=; echo over")) == "/usr\nover\n"


@pytest.mark.parametrize("shell", ["", "/bin/sh"])
def test_what_cannot_be_kept_is_said_and_leaves_what_was_there(box, monkeypatch, shell: str):
    if shell:
        monkeypatch.setattr(box.commands, "shell", shell)
    session = box.sessions.create()
    session.run("export n=1; cd /tmp")
    fill = "export n=2; cd /usr; head -c 100000000 /dev/zero > /dev/shm/fill"
    full = session.run(fill)
    assert "the session could not keep" in full.stderr
    assert said(box.commands.run("ls /dev/shm/.dockyard-sessions")) == f"{session.id}\n"
    assert said(session.run("echo $n; pwd; rm /dev/shm/fill; export n=3")) == "1\n/tmp\n"
    assert said(session.run("echo $n")) == "3\n"
