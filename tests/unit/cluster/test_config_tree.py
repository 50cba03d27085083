"""The configuration: what a file, flags and defaults amount to, and errors that name the field."""

import re
from pathlib import Path

import pytest
import yaml

from cluster import config
from cluster.config import DockyardConfig, load_config
from protocol.errors import InvalidInput


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKYARD_HOME", str(tmp_path / "home"))


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "c.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "gateway: {port: 1234, drain_s: 5}\nworkers: {threads: 3}\n")
    config = load_config(path, gateway__port=99, model=None, workers__disaggregated=False)
    assert (config.gateway.port, config.gateway.drain_s, config.model) == (99, 5.0, "smollm2")
    assert (config.workers.threads, config.workers.disaggregated) == (3, False)


def test_the_resolved_tree_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(None, gateway__port=0)
    assert load_config(written(tmp_path, config.resolved_yaml())) == config
    assert yaml.safe_load(config.resolved_yaml())["ray"]["object_store_bytes"] == 512 << 20


def test_the_state_folder_comes_from_the_environment_unless_it_is_set(tmp_path: Path) -> None:
    assert load_config().state_dir == tmp_path / "home"
    assert load_config(written(tmp_path, "state_dir: /elsewhere")).state_dir == Path("/elsewhere")


@pytest.mark.parametrize("content", ["", "\n", "# nothing\n", "gateway:\n"])
def test_a_section_without_values_has_the_defaults(tmp_path: Path, content: str) -> None:
    config = load_config(written(tmp_path, content), gateway__port=7)
    assert config == DockyardConfig(state_dir=tmp_path / "home", gateway=config.gateway)
    assert config.gateway.port == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("workers: {threads: -1}", "workers.threads is -1.*docs/serving.md"),
        ("workers: {disaggregated: maybe}", "workers.disaggregated is 'maybe'"),
        ("gateway: {port: 65536}", "gateway.port is 65536"),
        ("sandbox: {substrate: moon}", "sandbox.substrate is 'moon'"),
        ("nonsense: 1", r"there is no field nonsense \(the tree has: model, state_dir, gateway, "),
        (
            "workers: {dissagregated: false}",
            r"no field workers\.dissagregated \(do you mean workers\.disaggregated\? workers has: .*threads",
        ),
        ("disaggregated: false", r"no field disaggregated \(do you mean workers\.disaggregated\? the tree"),
        (
            "workers: {tiers: {host_byte: 1}}",
            r"do you mean workers\.tiers\.host_bytes\? workers\.tiers has: ",
        ),
        ("workers: {port: 1}", r"no field workers\.port \(do you mean gateway\.port\? "),
        ("gateway: {prot: 1}", "gateway.prot"),
        ("gateway: 5", "gateway is 5"),
        ("gateway: [1]", r"gateway is \[1\]"),
        ("- a\n- list", "expected a mapping at the top, found list"),
        ("5", "expected a mapping at the top, found int"),
        ("{", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        load_config(written(tmp_path, content), gateway__host="127.0.0.1")
    assert "c.yaml" in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="Is a directory"):
        load_config(tmp_path)


def test_the_pages_configuration_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "serving.md"
    blocks = page.read_text().split("```yaml\n")[1:]
    assert blocks
    for block in blocks:
        config = load_config(written(tmp_path, block.split("```")[0]))
        assert config.workers.tiers.host_bytes == 1 << 30


def test_the_page_has_all_that_read_the_environment() -> None:
    root = Path(config.__file__).parents[1]
    page = (root / "docs/structure.md").read_text()
    folders = set(re.findall(r"^\| `(\w+)/`", page, re.MULTILINE)) - {"bench"}
    paragraph = next(each for each in page.split("\n\n") if each.startswith("Settings are one tree"))
    reads = re.compile(r"\bos\.environ\b|\bgetenv\b|\bimport environ\b")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    found = {str(file.relative_to(root)) for file in files if reads.search(file.read_text())}
    assert found == set(re.findall(r"`([\w/]+\.py)`", paragraph))
