"""Shell sessions: commands that find the directory, variables and functions that the one before them left.

Each command is a shell of its own, told to bring back what the last one saved and to save it again when it
ends. Nothing is typed into a running shell, so no prompt is waited for, an unclosed quote or heredoc is that
command's own error, and a command that hangs, is killed or replaces its shell leaves the session as it was.
Background processes end with their command, as all do; a server is started with `commands.start`.
"""

import os
from collections.abc import Mapping
from functools import partial
from threading import Lock

from protocol.ids import new_id
from sandbox.arguments import check_type
from sandbox.checking import checked
from sandbox.commands import Commands
from sandbox.errors import FileError, InvalidArgument
from sandbox.feed import OnOutput
from sandbox.files import Files
from sandbox.forks import leave_in_children
from sandbox.named import Named
from sandbox.orders import checked_env
from sandbox.paths import WORKDIR, absolute
from sandbox.results import CommandResult
from sandbox.running import RunningCommand, run_to_end

_FOLDER = "/dev/shm/.dockyard-sessions"  # which no snapshot takes and no policy makes read-only
# Of the shell itself: to set them again fails, or would (RANDOM) make the next command repeat this one. The
# directory is entered.
_OWN = (
    "BASH|BASH(OPTS|PID)|BASH_(ALIASES|ARGC|ARGV0?|CMDS|COMMAND|EXECUTION_STRING|LINENO|MONOSECONDS|REMATCH|"
    "SOURCE|SUBSHELL|TRAPSIG|VERSINFO|VERSION)|COMP_(CWORD|KEY|LINE|POINT|TYPE|WORDBREAKS|WORDS)|DIRSTACK|"
    "EPOCH(REALTIME|SECONDS)|E?UID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD|S?RANDOM|SECONDS|"
    "SHELLOPTS|_|__dockyard_[a-z]+"
)
_SAVE = {
    # `cd` changes OLDPWD, which is set anew behind it; options may be what functions need to be read.
    "bash": f"""\
printf '__dockyard_enter %q\\n' "$PWD"
declare -p | while IFS= read -r __dockyard_line; do
[[ $__dockyard_line =~ ^declare\\ -[A-Za-z-]+\\ ({_OWN})(=|$) ]] || printf '%s\\n' "$__dockyard_line"; done
shopt -p; declare -f; umask -p; set +o""",
    # Any other shell: what is exported, and the directory.
    "sh": "export PWD; export -p; printf '__dockyard_enter \"$PWD\"\\n'",
}
# Runs a program without the variables that are exported: these may be more than a program can be given.
_BARE = {
    "bash": '(builtin exec -c "/bin/$@")',
    "sh": """\
command -p "$@" 2>/dev/null || export -p | {
while IFS= read -r __dockyard_line; do
case $__dockyard_line in "export "*)
__dockyard_line=${__dockyard_line#export }
command unset -v "${__dockyard_line%%=*}" 2>/dev/null ;;
esac
done
command -p "$@"
}""",
}
# A command may want to do something at its end as well: its EXIT trap comes after the session's, which saves.
_TRAP = {
    "bash": """\
trap() {
if [ "$BASH_SUBSHELL" -gt 0 ]; then builtin trap "$@"; return; fi
builtin trap - EXIT
eval "${__dockyard_trap:+builtin $__dockyard_trap}"
builtin trap "$@" && __dockyard_code=0 || __dockyard_code=$?
__dockyard_trap=$(builtin trap -p EXIT)
case $__dockyard_trap in *__dockyard_leave*) __dockyard_trap= ;; esac
builtin trap __dockyard_leave EXIT
return $__dockyard_code
}
__dockyard_return() { return "$1"; }
__dockyard_finish() {
eval "__dockyard_words=($__dockyard_trap)"
case $__dockyard_code in
0) eval "${__dockyard_words[2]-}" ;;
*) __dockyard_return "$__dockyard_code" || eval "${__dockyard_words[2]-}" ;;
esac
}""",
    "sh": "__dockyard_finish() { :; }",
}
_SCRIPT = """\
__dockyard_script=$1 __dockyard_state=$2 __dockyard_first=$3 __dockyard_trap=
shift 3
__dockyard_enter() {{
command cd -- "$1" || {{
command cd -- "$__dockyard_first" || command cd -- {workdir} || command cd /
printf 'dockyard: %s cannot be entered: this command starts in %s\\n' "$1" "$PWD" >&3
}}
unset -v OLDPWD; export OLDPWD
}}
if [ -e "$__dockyard_state" ]; then
. "$__dockyard_state" 3>&2 >/dev/null 2>&1
else
__dockyard_enter "$__dockyard_first" 3>&2 >/dev/null 2>&1
fi
{trap}
__dockyard_bare() {{
{bare}
}}
__dockyard_save() {{
[ "$__dockyard_state" ] || return 0
{{ {save}; printf ':\\n'; }} 2>/dev/null >|"$__dockyard_state.$$" &&
__dockyard_bare mv -f -- "$__dockyard_state.$$" "$__dockyard_state" || {{
__dockyard_bare rm -f -- "$__dockyard_state.$$"
printf 'dockyard: the session could not keep what this command left; is /dev/shm full?\\n' >&2
}}
__dockyard_state=
}}
__dockyard_leave() {{
__dockyard_code=$?
command trap - EXIT
__dockyard_save
__dockyard_finish
exit $__dockyard_code
}}
command trap __dockyard_leave EXIT
eval "$__dockyard_script"
__dockyard_code=$?
__dockyard_save
exit $__dockyard_code
"""


class Session(Named):
    """One, for one command at a time. Thread-safe: a second command waits for the first."""

    def __init__(self, commands: Commands, cwd: str, env: Mapping[str, str]) -> None:
        """For `Sessions.create`."""
        self.id = new_id("ses")
        self._commands = commands
        self._first, self._env = absolute(cwd or "."), env
        self._lock = Lock()
        leave_in_children(self)
        kind = "bash" if commands.shell.endswith("/bash") else "sh"
        self._script = _SCRIPT.format(save=_SAVE[kind], trap=_TRAP[kind], bare=_BARE[kind], workdir=WORKDIR)

    @property
    def sandbox_id(self) -> str:
        """Whose session it is."""
        return self._commands.sandbox_id

    def leave(self) -> None:
        """In a child of a fork, where no other thread runs a command of it."""
        self._lock = Lock()

    def timeout_of_run(self, timeout_s: float | None) -> float:
        """See `Commands.timeout_of_run`."""
        return self._commands.timeout_of_run(timeout_s)

    def run(
        self,
        cmd: str,
        *,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Runs a command line in the session's shell; see `Commands.run`.

        What it leaves behind when it ends by itself, also by `exit`, is there for the next: its directory,
        variables, functions and options. A command that is ended (timeout, kill) leaves what was there. Its
        error output says where it begins elsewhere, since the directory cannot be entered any more, and where
        what it has left could not be kept.
        """
        with self._lock:
            start = partial(
                self.start, cmd, timeout_s=self.timeout_of_run(timeout_s), output_bytes=output_bytes,
                stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr,
            )  # fmt: skip
            result = run_to_end(start)
        return checked(result, self.sandbox_id) if check else result

    def start(
        self,
        cmd: str,
        *,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        stdin: bytes | str | None = b"",
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> RunningCommand:
        """Like `run`, without waiting. A command that starts meanwhile does not see what this one leaves."""
        argv = [self._commands.shell, "-c", self._script, "session", cmd, f"{_FOLDER}/{self.id}", self._first]
        return self._commands.start(
            argv, timeout_s=timeout_s, cwd="/", env=self._env, output_bytes=output_bytes, stdin=stdin,
            on_stdout=on_stdout, on_stderr=on_stderr,
        )  # fmt: skip


class Sessions:
    """`sandbox.sessions`. Thread-safe."""

    def __init__(self, commands: Commands, files: Files) -> None:
        self._commands, self._files = commands, files

    def create(self, *, cwd: str = "/workspace", env: Mapping[str, str] | None = None) -> Session:
        """A session that begins in `cwd` with `env` added to the sandbox's environment.

        A relative `cwd` starts at /workspace. Raises InvalidArgument where it is no directory, SandboxGone.
        """
        check_type("cwd", cwd, str)
        added = dict(checked_env(env or {}))
        try:
            self._files.stat(f"{cwd or '.'}/.")
        except FileError as error:
            why = os.strerror(error.errno or 0)
            raise InvalidArgument(f"cwd={cwd!r}: {why}", hint="name a directory of the sandbox") from error
        self._files.make_dir(_FOLDER)
        return Session(self._commands, cwd, added)
