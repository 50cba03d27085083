"""The command's root: subcommands, and how errors become exit codes.

Exit codes: 0 done, 1 it failed, 2 bad input, 3 a tool or feature is missing, 4 not enough of a resource,
129 SIGHUP, 130 Ctrl-C, 141 nobody reads its output any more, 143 SIGTERM.

Only the modules of the command that is asked for are loaded, and nothing before signals are answered.
"""

import signal
import sys

from cli.ending import Ending


def main() -> None:
    """Entry point of the `dockyard` script."""
    ending = Ending()
    ending.at_once()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or, ignored, no program's end would be known
    try:
        code = run(sys.argv[1:], ending)
    except KeyboardInterrupt:  # a second one, before the first was over
        ending.no_more()
        code = ending.code
    sys.exit(code)


def run(arguments: list[str], ending: Ending | None = None) -> int:
    """Run one command and return its exit code. Without an `ending` signals do what they did before."""
    from cli.root import invoke  # brings typer

    return invoke(arguments, ending)


if __name__ == "__main__":
    main()
