import hashlib
import io
import sys
import tarfile

import pytest

from evals.bugs import load_recipe, recipe_names
from evals.fetch import FetchError, Sdist, fetch_sdist, unpack
from protocol.errors import InvalidInput


def archive(path, *entries):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
    return path


def test_an_archive_is_unpacked_without_its_top_folder(tmp_path):
    path = archive(tmp_path / "a.tar.gz", ("a-1/x.py", b"x"), ("a-1/p/y.py", b"y"))
    assert unpack(path).files == {"x.py": b"x", "p/y.py": b"y"}


@pytest.mark.parametrize("name", ["../evil.py", "a-1/../../evil.py"])
def test_an_archive_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(InvalidInput, match="cannot be unpacked"):
        unpack(archive(tmp_path / "a.tar.gz", (name, b"x")))


def test_links_in_an_archive_are_not_taken(tmp_path):
    path = archive(tmp_path / "a.tar.gz", ("a-1/x.py", b"x"), ("a-1/leak", "/etc/passwd"))
    assert unpack(path).files == {"x.py": b"x"}


def test_what_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"hello")
    with pytest.raises(InvalidInput, match="cannot be unpacked"):
        unpack(path)


def test_a_cached_archive_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # pip could not even start
    content = archive(tmp_path / "a.tar.gz", ("a-1/x.py", b"x")).read_bytes()
    sdist = Sdist(package="a", version="1", sha256=hashlib.sha256(content).hexdigest())
    (tmp_path / f"{sdist.sha256}.tar.gz").write_bytes(content)
    assert unpack(fetch_sdist(sdist, tmp_path)).files == {"x.py": b"x"}


def test_a_failing_pip_is_one_line_without_addresses(tmp_path, monkeypatch):
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'ERROR: cannot reach https://somewhere.example/simple/a' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(FetchError) as caught:
        fetch_sdist(Sdist(package="a", version="1", sha256="0" * 64), tmp_path / "cache")
    assert "could not fetch a 1: cannot reach <address>" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_bytes_than_pinned_are_refused(tmp_path, monkeypatch):
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\necho other > "$2/a-1.tar.gz"\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(FetchError, match="other bytes than its recipe pins"):
        fetch_sdist(Sdist(package="a", version="1", sha256="0" * 64), tmp_path / "cache")


def test_the_shipped_recipes_are_whole():
    assert {"h11", "parse"} <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.licence == "MIT"
        assert recipe.num_pass_to_pass >= 20
        assert len(recipe.instruction) < 600  # the model's context is short


def test_an_unknown_recipe_is_named_with_those_there_are():
    with pytest.raises(InvalidInput, match=r"'nope'.*h11, parse"):
        load_recipe("nope")
