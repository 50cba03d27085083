"""Profiles in the kernel: loaded with their first sandbox, unloaded with their last.

A profile's name holds the state directory's key, so nobody else unloads it; which sandboxes use it is kept as
one empty file each under `apparmor/NAME` of that directory, changed under a lock. Whether it is loaded, only
the kernel knows: files outlive a restart of the machine, and administrators unload what no package has.
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from sandbox.errors import StartError, is_shortage
from sandbox.listings import list_folder
from sandbox.places import make_folder
from sandbox.policy.apparmor import PREFIX, Profile
from sandbox.programs import run_program
from sandbox.texts import one_line

_PATIENCE_S = 60.0
_LOADED = Path("/sys/kernel/security/apparmor/profiles")


def is_available() -> bool:
    """Whether this process may load profiles: root, a parser, and a kernel that has AppArmor on."""
    return os.geteuid() == 0 and _is_on()


@cache
def _is_on() -> bool:
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    found = enabled.exists() and enabled.read_text().strip() == "Y"
    return found and shutil.which("apparmor_parser") is not None


class LoadedProfiles:
    """Those of one state directory, whose scope they have. Safe between processes; blocks while another loads
    one. Files that name another profile, which an ordinary user may have made in his, are nobody's."""

    def __init__(self, state_dir: Path, scope: str) -> None:
        self._folder, self._name_start = state_dir / "apparmor", f"{PREFIX}{scope}-"

    def acquire(self, profile: Profile, sandbox_id: str) -> None:
        """Loads it unless it is. Half a second the first time. Raises StartError with the parser's words."""
        with self._locked():
            users = self._folder / profile.name
            if not _is_loaded(profile.name):
                _parser("--replace", profile.text)
            make_folder(users)
            (users / sandbox_id).touch()

    def release(self, sandbox_id: str) -> None:
        """Of whichever profile it uses. Idempotent. StartError or OSError where it is not unloaded, which a
        sweep tries again."""
        if not self._folder.is_dir():
            return
        with self._locked():
            for name in [name for name, users in self.users().items() if sandbox_id in users]:
                users = self._folder / name
                self._unload_unused(users)
                (users / sandbox_id).unlink()
                with suppress(OSError):  # others use it
                    users.rmdir()

    def users(self) -> dict[str, set[str]]:
        """The sandboxes that use each profile."""
        profiles = (path for path in list_folder(self._folder, f"{self._name_start}*") if path.is_dir())
        return {each.name: {user.name for user in list_folder(each)} for each in profiles}

    def _unload_unused(self, users: Path) -> None:
        if len(list(users.iterdir())) == 1 and _is_loaded(users.name):
            _parser("--remove", f"profile {users.name} {{}}\n")

    @contextmanager
    def _locked(self) -> Generator[None]:
        make_folder(self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self._folder / "lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _is_loaded(name: str) -> bool:
    """False too where the kernel shows no list: loading again does no harm. OSError for want of a
    descriptor."""
    try:
        lines = _LOADED.read_text().splitlines()
    except OSError as error:
        if is_shortage(error):
            raise
        return False
    return any(line.rpartition(" (")[0] == name for line in lines)


def _parser(action: str, text: str) -> None:
    done = run_program(["apparmor_parser", action, "--skip-cache"], given=text, patience_s=_PATIENCE_S)
    if done.returncode != 0:
        raise StartError(f"apparmor_parser {action}: {one_line(done.stderr)}", phase="policy")
