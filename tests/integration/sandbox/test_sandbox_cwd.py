"""Where a command starts: relative places are the same to commands, sessions and files."""

import pytest

from sandbox import Sandbox
from sandbox.errors import InvalidArgument


def test_relative_places_start_at_the_workspace(box: Sandbox):
    box.files.write("sub/deep/a", "here")
    assert box.commands.run("pwd; cat a", cwd="sub/deep").stdout == "/workspace/sub/deep\nhere"
    assert box.commands.run("pwd", cwd="").stdout == "/workspace\n"
    assert box.commands.run("pwd", cwd="sub/../../tmp").stdout == "/tmp\n"
    assert box.commands.start("pwd", cwd="sub").wait().stdout == "/workspace/sub\n"
    session = box.sessions.create(cwd="sub")
    assert session.run("pwd; cd deep").stdout == "/workspace/sub\n"
    assert session.run("pwd").stdout == "/workspace/sub/deep\n"


def test_a_session_in_no_directory_is_refused_at_once(box: Sandbox):
    box.files.write("file", "")
    for place, why in (("nope", "No such file"), ("/nope/a", "No such file"), ("file", "Not a directory")):
        with pytest.raises(InvalidArgument, match=f"^cwd='{place}': .*{why}"):
            box.sessions.create(cwd=place)
    box.commands.run("ln -s /tmp link")
    assert box.sessions.create(cwd="link").run("pwd -P").stdout == "/tmp\n"
