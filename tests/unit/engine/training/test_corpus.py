"""The training text: what is held out is so for good, and nothing of it is learned from."""

from pathlib import Path

from engine.training.corpus import SourceFile, num_bytes, standard_library


def library(folder: Path, count: int = 120) -> Path:
    for number in range(count):
        path = folder / f"package_{number % 7}" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"value = {number}\n")
    return folder


def test_files_are_held_out_by_their_path_alone(tmp_path: Path):
    corpus = standard_library(library(tmp_path))
    held_out = {file.path for file in corpus.held_out}
    assert held_out == {f.path for f in (*corpus.training, *corpus.held_out) if f.is_held_out}
    assert 0 < len(held_out) < 20
    assert not held_out & {file.path for file in corpus.training}
    (tmp_path / "package_0" / "another.py").write_text("x = 1\n")
    assert held_out <= {file.path for file in standard_library(tmp_path).held_out} | {"package_0/another.py"}


def test_files_of_a_package_are_neighbours(tmp_path: Path):
    packages = [file.path.split("/")[0] for file in standard_library(library(tmp_path)).training]
    assert packages == sorted(packages)


def test_what_is_no_text_or_not_the_librarys_is_left_out(tmp_path: Path):
    library(tmp_path, 10)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "empty.py").write_text("")
    other = tmp_path / "site-packages"
    other.mkdir()
    (other / "foreign.py").write_text("x = 1\n")
    corpus = standard_library(tmp_path)
    assert len(corpus.training) + len(corpus.held_out) == 10


def test_the_digest_names_the_text(tmp_path: Path):
    before = standard_library(library(tmp_path)).digest
    assert standard_library(tmp_path).digest == before
    (tmp_path / "package_1" / "module_1.py").write_text("value = 2\n")
    assert standard_library(tmp_path).digest != before


def test_bytes_are_counted_as_utf8():
    assert num_bytes([SourceFile("a.py", "é"), SourceFile("b.py", "ab")]) == 4
