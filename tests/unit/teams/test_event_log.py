"""The event log: what is written comes back, a torn tail is tolerated, anything else wrong is named."""

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidInput
from protocol.events import Edge, Interval
from teams.events import EventLog


def interval(id: str, start_ns: int = 0, end_ns: int = 10, agent: str = "lead") -> Interval:
    return Interval(id, agent, "tool.run", start_ns, end_ns, "pytest", {"exit": 0, "ok": True, "load": 0.5})


def written(path: Path) -> EventLog:
    with EventLog("run-1", path) as log:
        log.extend([interval("a"), interval("b", 10, 20), Edge("message", "a", "b")])
    return log


def test_a_log_comes_back_as_it_was(tmp_path: Path):
    log = written(tmp_path / "events.jsonl")
    again = EventLog.load(tmp_path / "events.jsonl")
    assert (again.run_id, again.intervals, again.edges) == (log.run_id, log.intervals, log.edges)
    assert again.torn_bytes == 0


def test_each_record_reaches_the_file_before_add_returns(tmp_path: Path):
    log = EventLog("run-1", tmp_path / "events.jsonl")
    log.add(interval("a"))
    assert EventLog.load(tmp_path / "events.jsonl").intervals == (interval("a"),)
    log.checkpoint()
    log.close()


@pytest.mark.parametrize("kept", range(1, 30))
def test_a_file_cut_anywhere_in_its_last_line_loses_only_that_line(tmp_path: Path, kept: int):
    path = tmp_path / "events.jsonl"
    written(path)
    *head, last, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*head, last[:kept]]))
    log = EventLog.load(path)
    assert [i.id for i in log.intervals] == ["a", "b"]
    assert (log.edges, log.torn_bytes) == ((), kept)


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    written(path)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    log = EventLog.load(path)
    assert (len(log.edges), log.torn_bytes) == (1, 0)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"record":"interval","id":"c","agent":"x","kind":"model.dance","start_ns":0,"end_ns":1}', "kind"),
        ('{"record":"interval","id":"c","agent":"x","kind":"wait","start_ns":0,"end_ns":1,"mood":1}', "mood"),
        ('{"record":"interval","id":"c","agent":"x","kind":"wait","start_ns":0,"end_ns":"1"}', "end_ns"),
        ('{"record":"interval","id":"c","agent":"x","kind":"wait","start_ns":5,"end_ns":1}', "end_ns 1"),
        ('{"record":"interval","id":"a","agent":"x","kind":"wait","start_ns":5,"end_ns":9}', "'a'"),
        ('{"record":"edge","kind":"rumour","source":"a","target":"b"}', "kind"),
        ('{"record":"heartbeat"}', "heartbeat"),
        ('{"record":"run","version":1,"run_id":"other"}', "second header"),
        ("not json", "line 5"),
        ("", "line 5"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str, names: str):
    path = tmp_path / "events.jsonl"
    written(path)
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    with pytest.raises(InvalidInput, match=names) as caught:
        EventLog.load(path)
    assert "line 5" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b'{"record":"edge","kind":"join","source":"a","target":"b"}\n']
)
def test_a_file_without_header_is_no_log(tmp_path: Path, content: bytes):
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput):
        EventLog.load(path)


def test_a_missing_file_and_an_existing_one_are_named(tmp_path: Path):
    with pytest.raises(InvalidInput, match="No such file"):
        EventLog.load(tmp_path / "none")
    written(tmp_path / "events.jsonl")
    with pytest.raises(InvalidInput, match="exists already"):
        EventLog("run-2", tmp_path / "events.jsonl")


def test_repeats_are_harmless_and_other_content_is_not():
    log = EventLog("run-1")
    log.extend([interval("a"), interval("a"), Edge("join", "a", "b"), Edge("join", "a", "b")])
    assert (len(log.intervals), len(log.edges)) == (1, 1)
    with pytest.raises(InvalidInput, match="'a' is there already"):
        log.add(interval("a", 1, 2))


def test_what_cannot_be_an_event_is_refused():
    log = EventLog("run-1")
    with pytest.raises(InvalidInput, match="to itself"):
        log.add(Edge("join", "a", "a"))
    with pytest.raises(InvalidInput, match="neither may be empty"):
        log.add(interval("a", agent=""))
    log.close()
    with pytest.raises(InvalidInput, match="closed"):
        log.add(interval("a"))


def test_a_begin_without_end_is_closed_at_the_last_known_time(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = EventLog("run-1", path)
    log.begin(interval("a", 5, 5))
    log.begin(interval("b", 7, 7))
    log.add(interval("b", 7, 30))
    log.close()
    for seen in (log, EventLog.load(path)):
        assert [i.id for i in seen.intervals] == ["b"]
        (left,) = seen.unfinished
        assert (left.id, left.start_ns, left.end_ns, left.attributes["unfinished"]) == ("a", 5, 30, True)


def test_threads_lose_nothing(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog("run-1", path) as log:

        def emit(agent: str) -> None:
            log.extend(interval(f"{agent}-{n}", n, n + 1, agent) for n in range(200))

        threads = [threading.Thread(target=emit, args=(f"agent{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {i.id for i in EventLog.load(path).intervals} == {
        f"agent{a}-{n}" for a in range(4) for n in range(200)
    }


@given(name=st.text(), value=st.one_of(st.text(), st.integers(-(2**63), 2**63), st.booleans()))
@settings(deadline=None)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, name: str, value: str | int | bool):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    event = Interval("a", "lead", "tool.run", 0, 1, name, {"value": value})
    with EventLog("run-1", path) as log:
        log.add(event)
    assert EventLog.load(path).intervals == (event,)


def test_a_lone_surrogate_does_not_stop_the_log(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog("run-1", path) as log:
        log.add(Interval("a", "lead", "tool.run", 0, 1, "bad \udc80 byte"))
    assert EventLog.load(path).intervals[0].name == "bad ? byte"
