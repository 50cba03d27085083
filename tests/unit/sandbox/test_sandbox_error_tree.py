"""The error tree: whole, documented, the same for machines as for callers."""

import asyncio
import json
import pickle
import re
from pathlib import Path

import pytest

from cli.console import fail
from protocol.errors import InvalidInput, MissingCapability, ResourceShortage
from sandbox import errors
from sandbox.checking import checked
from sandbox.errors import (
    AuthError,
    CapacityError,
    CommandError,
    CommandTimeout,
    Conflict,
    FileError,
    FileMissing,
    FileTooLarge,
    InvalidArgument,
    NoSpace,
    OutputLimit,
    PathDenied,
    PolicyDenied,
    QuotaError,
    RequestTimeout,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    StartError,
    UnsafePath,
    UnsupportedError,
    VersionConflict,
    classes,
    error_of,
    translated,
)
from sandbox.results import CommandResult, Reason

DOCS = Path(__file__).parents[3] / "docs" / "sandbox-errors.md"


def result(reason: Reason, exit_code: int | None) -> CommandResult:
    return CommandResult(exit_code, reason, b"secret", b"", False, 1.0)


def one_of_each() -> list[SandboxError]:
    """Every class, with all that it can say."""
    common = {"hint": "do this", "sandbox_id": "sbx-1"}
    plain = (
        SandboxError, InvalidArgument, UnsupportedError, CapacityError, AuthError, VersionConflict, Conflict,
        SandboxNotFound, RequestTimeout,
    )  # fmt: skip
    of_files = (FileError, FileMissing, FileTooLarge, UnsafePath, NoSpace)
    of_commands = (
        (CommandError, "exit", 3),
        (CommandTimeout, "timeout", 137),
        (OutputLimit, "output_limit", 137),
    )
    return [
        *(kind("words", **common) for kind in plain),
        QuotaError("words", limit="pids", **common),
        StartError("words", phase="launch", **common),
        SandboxGone("words", reason="idle", **common),
        *(kind("words", result=result(reason, code), **common) for kind, reason, code in of_commands),
        PolicyDenied("words", field="devices", **common),
        PathDenied("words", field="masked", path="/a", number=13, **common),
        *(kind("words", path="/a", number=5, **common) for kind in of_files),
    ]


ALL = pytest.mark.parametrize("error", one_of_each(), ids=lambda error: type(error).__name__)


def test_the_list_of_this_file_is_the_whole_tree():
    assert {type(error) for error in one_of_each()} == set(classes())


def test_codes_are_unique_and_stable():
    codes = {kind.__name__: kind.code for kind in classes()}
    assert len(set(codes.values())) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes.values())
    assert codes["SandboxGone"] == "gone"
    assert codes["CapacityError"] == "capacity"


def test_the_table_of_the_page_has_each_class_with_its_code_and_blame():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert rows == {kind.__name__: kind.code for kind in classes()}


def test_the_drawing_has_each_class_below_its_own():
    drawing = errors.__doc__ or ""
    for kind in classes():
        assert re.search(rf"\b{kind.__name__}\b", drawing), kind


def test_each_refines_a_builtin_or_one_of_the_projects():
    for kind, refined in {
        InvalidArgument: InvalidInput, UnsupportedError: MissingCapability, CapacityError: ResourceShortage,
        AuthError: PermissionError, SandboxNotFound: LookupError, RequestTimeout: TimeoutError,
        CommandTimeout: TimeoutError, FileMissing: FileNotFoundError, PathDenied: FileError,
    }.items():  # fmt: skip
        assert issubclass(kind, refined)


def test_a_sandbox_that_vanished_is_no_timeout():
    assert not issubclass(SandboxGone, TimeoutError)
    assert not {kind for kind in classes() if issubclass(kind, TimeoutError)} - {
        RequestTimeout,
        CommandTimeout,
    }


@ALL
def test_what_can_be_tried_again_says_when(error: SandboxError):
    assert error.retryable == (error.retry_after_s is not None)
    assert error.retry_after_s is None or error.retry_after_s >= 0


@ALL
def test_it_names_its_sandbox_and_its_node(error: SandboxError):
    record = json.loads(json.dumps(error.record()))
    assert record["type"] == type(error).__name__
    assert (record["message"], record["hint"], record["sandbox_id"]) == ("words", "do this", "sbx-1")
    assert record["node"]
    assert record["blame"] in ("agent", "platform", "caller")


@ALL
def test_it_crosses_processes_whole(error: SandboxError):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.record() == error.record()


@ALL
def test_it_is_made_again_of_its_record(error: SandboxError):
    again = error_of(json.loads(json.dumps(error.record())))
    if isinstance(error, CommandError):
        assert type(again) is SandboxError
        return
    assert type(again) is type(error)
    assert again.record() == error.record()


def test_a_record_of_another_version_is_an_error_all_the_same():
    assert type(error_of({"code": "new_code", "message": "words"})) is SandboxError
    assert type(error_of({})) is SandboxError
    gone = error_of({"code": "gone", "reason": "eaten"})
    assert isinstance(gone, SandboxGone)
    assert gone.reason == "lost"


@ALL
def test_the_command_line_prints_the_same(error: SandboxError, capsys: pytest.CaptureFixture[str]):
    fail(error, as_json=True)
    out = capsys.readouterr().out
    assert json.loads(out)["error"] == error.record()


@ALL
def test_nothing_of_a_commands_output_is_in_what_an_error_says(error: SandboxError):
    assert "secret" not in f"{error} {error!r} {error.record()}"


@pytest.mark.parametrize(
    ("reason", "exit_code", "kind", "words"),
    [
        ("exit", 3, CommandError, "exited with 3"),
        ("signal", 139, CommandError, "ended by signal 11"),
        ("oom", 137, CommandError, "memory limit"),
        ("killed", 137, CommandError, "was killed"),
        ("timeout", 137, CommandTimeout, "in its time"),
        ("output_limit", 137, OutputLimit, "more than it may"),
        ("lost", None, SandboxGone, "went away"),
    ],
)
def test_each_end_has_its_error(reason: Reason, exit_code: int | None, kind: type[SandboxError], words: str):
    with pytest.raises(kind, match=words) as caught:
        checked(result(reason, exit_code), "sbx-1")
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.sandbox_id) == (reason, "sbx-1")
    if isinstance(caught.value, CommandError):
        assert (caught.value.exit_code, caught.value.stdout) == (exit_code, "secret")


def test_a_good_end_is_the_result():
    good = result("exit", 0)
    assert checked(good, "sbx-1") is good


def test_translation_leaves_what_is_an_error_of_ours():
    """Some are an OSError too, and would lose what they are."""
    with pytest.raises(FileMissing), translated("doing something"):
        raise FileMissing("words", path="/a", number=2)
    with pytest.raises(AuthError) as told, translated("doing it", sandbox_id="sbx-1"):
        raise AuthError("words")
    assert told.value.sandbox_id == "sbx-1"
    with pytest.raises(StartError, match="doing something: no such luck"), translated("doing something"):
        raise OSError(5, "no such luck")
    with (
        pytest.raises(SandboxError, match="no such luck") as caught,
        translated("doing it", sandbox_id="sbx-1"),
    ):
        raise OSError(5, "no such luck")
    assert (type(caught.value), caught.value.phase) == (SandboxError, "")  # it is there, so it did start


def test_asyncio_takes_none_of_them_for_its_own():
    async def scene() -> None:
        raise RequestTimeout("words")

    with pytest.raises(RequestTimeout):
        asyncio.run(scene())


def test_a_name_of_the_sandboxs_moves_no_cursor_and_begins_no_line():
    error = FileMissing("a\x1b[2J\nERROR b\udcff ä: gone", path="a", number=2)
    assert str(error) == r"a\x1b[2J\nERROR b\udcff ä: gone"
    assert str(error_of(error.record())) == str(pickle.loads(pickle.dumps(error))) == str(error)
