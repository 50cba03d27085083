"""pip in a sandbox: from a folder without a network, into environments, and from an index by its name."""

import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sandbox_internet import HOST, Internet

from sandbox import CommandResult, Sandbox
from sandbox.egress import namespaces

WHEEL = "tiny-1.0-py3-none-any.whl"
PORT = 8080
_FACTS = "tiny-1.0.dist-info"
_WHEEL_FILES = {
    "tiny.py": "def main():\n    print('tiny works')\n",
    f"{_FACTS}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    f"{_FACTS}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{_FACTS}/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    f"{_FACTS}/RECORD": f"tiny.py,,\n{_FACTS}/METADATA,,\n{_FACTS}/WHEEL,,\n{_FACTS}/RECORD,,\n",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package of one module and one program."""
    path = tmp_path / "simple" / "tiny" / WHEEL
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, text in _WHEEL_FILES.items():
            file.writestr(name, text)
    return path


@pytest.fixture
def index(internet: Internet, wheel: Path) -> Iterator[str]:
    """An index of packages in the network that stands for the world; its URL."""
    handler = partial(Quiet, directory=str(wheel.parents[2]))
    made: list[ThreadingHTTPServer] = []
    namespaces.run_in(internet.namespace, lambda: made.append(ThreadingHTTPServer((HOST, PORT), handler)))
    thread = threading.Thread(target=made[0].serve_forever)
    thread.start()
    yield f"http://index.example.org:{PORT}/simple"
    made[0].shutdown()
    thread.join()
    made[0].server_close()


def run(box: Sandbox, command: str) -> CommandResult:
    result = box.commands.run(command, timeout_s=240)
    assert result.ok, result.stderr
    return result


@pytest.mark.parametrize("pip", ["pip", "pip3", "python3 -m pip"])
def test_a_wheel_is_installed_without_a_network(box: Sandbox, wheel: Path, pip: str):
    box.files.write(f"/workspace/{WHEEL}", wheel.read_bytes())
    said = run(box, f"{pip} install --no-index ./{WHEEL}")
    assert "WARNING" not in said.stderr
    assert run(box, "tiny && python3 -c 'import tiny; tiny.main()'").stdout == "tiny works\n" * 2
    assert "tiny" in run(box, f"{pip} list").stdout
    run(box, f"{pip} uninstall -y tiny && ! tiny")


def test_an_environment_has_a_pip_of_its_own(box: Sandbox, wheel: Path):
    box.files.write(f"/workspace/{WHEEL}", wheel.read_bytes())
    run(box, f"python3 -m venv env && env/bin/pip install --no-index ./{WHEEL}")
    assert run(box, "env/bin/tiny; python3 -c 'import tiny' 2>/dev/null || echo apart").stdout == (
        "tiny works\napart\n"
    )


def test_a_package_comes_from_an_index_by_its_name(
    connect: Callable[..., Sandbox], internet: Internet, index: str, substrate: str
):
    internet.names = {"index.example.org": [HOST]}
    box = connect(names=({"domains": ["index.example.org"], "ports": [PORT]},), substrate=substrate)
    options = f"--index-url {index} --trusted-host index.example.org"
    run(box, f"pip download {options} tiny && pip install {options} tiny")
    assert run(box, "ls *.whl; tiny").stdout == f"{WHEEL}\ntiny works\n"
