"""How requests begin, end and are refused, and what they leave behind: nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import drain, finish, small_engine
from tiny_gguf import EOS, TOKENS, byte_ids, write_tiny_gguf

from engine import Engine, Request, SamplingParams, load_model
from engine.chat.tokenizer import ChatTokenizer
from engine.errors import InvalidRequest, Overloaded
from kernels.operations import NUMERICS
from protocol.errors import DockyardError

PROMPT = tuple(byte_ids(b"hello world"))
FREE = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: Path, cpu_library: Path) -> Engine:
    return small_engine(tiny_model)


def test_max_tokens_ends_with_length(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)))
    outputs, reasons = drain(engine)
    assert (len(outputs["r"]), reasons["r"]) == (5, "length")


def test_a_stop_token_ends_with_stop_and_is_given_out(engine: Engine) -> None:
    free = finish(engine, [Request("free", PROMPT, FREE)])["free"]
    stop = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free[3],))
    engine.add(Request("r", PROMPT, stop))
    outputs, reasons = drain(engine)
    assert (outputs["r"], reasons["r"]) == (free[: free.index(free[3]) + 1], "stop")


def test_the_end_of_the_text_ends_with_stop(engine: Engine) -> None:
    free = finish(engine, [Request("free", PROMPT, FREE)])["free"]
    engine._postprocessing._eos_ids = frozenset({free[4]})
    engine.add(Request("r", PROMPT, SamplingParams(max_tokens=12)))
    engine.add(Request("ignoring", PROMPT, FREE))
    outputs, reasons = drain(engine)
    assert (outputs["r"], reasons["r"]) == (free[: free.index(free[4]) + 1], "stop")
    assert (outputs["ignoring"], reasons["ignoring"]) == (free, "length")


def test_eos_is_the_one_that_the_file_names(engine: Engine) -> None:
    assert engine._postprocessing._eos_ids == {EOS}


def test_forced_tokens_end_with_stop_even_at_eos(engine: Engine) -> None:
    forced = (*byte_ids(b"ab"), EOS, *byte_ids(b"cd"))
    engine.add(Request("r", PROMPT, SamplingParams(forced_ids=forced, max_tokens=1)))
    outputs, reasons = drain(engine)
    assert (outputs["r"], reasons["r"]) == (forced, "stop")


def test_generate_cuts_at_a_stop_string(engine: Engine, tiny_tokenizer: ChatTokenizer) -> None:
    forced = tuple(tiny_tokenizer.encode("hello the world"))
    whole, cut = (
        engine.generate(["hello"], SamplingParams(forced_ids=forced, stop=stop))[0] for stop in ((), ("e w",))
    )
    assert (whole, cut) == ("hello the world", "hello th")
    engine.check_integrity()
    assert engine.statistics().pool.held == 0


def test_generate_takes_ids_and_texts_and_keeps_their_order(
    engine: Engine, tiny_tokenizer: ChatTokenizer
) -> None:
    one, two, three = engine.generate(["hello", tiny_tokenizer.encode("hello"), "er"], FREE)
    assert one == two != three


def test_generate_that_refuses_one_prompt_keeps_none(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate(["hello", ""], FREE)
    assert not engine.has_work
    assert len(engine.generate(["hello"], FREE)) == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_leaves_nothing(engine: Engine, steps: int) -> None:
    expected = finish(engine, [Request("kept", PROMPT, FREE)])
    engine.add(Request("gone", PROMPT, FREE))
    engine.add(Request("kept", PROMPT, FREE))
    kept: tuple[int, ...] = ()
    for _ in range(steps):
        kept += tuple(
            t for output in engine.step().tokens if output.request_id == "kept" for t in output.token_ids
        )
    assert engine.abort("gone")
    assert not engine.abort("gone")
    engine.check_integrity()
    while engine.has_work:
        for output in engine.step().tokens:
            kept += output.token_ids
    assert kept == expected["kept"]
    assert engine.statistics().pool.held == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "parameter", "words"),
    [
        ((), FREE, "messages", "empty"),
        (PROMPT, SamplingParams(max_tokens=0), "max_tokens", "max_tokens is 0"),
        (PROMPT * 50, FREE, "messages", "550 prompt tokens and 12 new ones exceed the 512 positions"),
        (PROMPT, SamplingParams(max_tokens=502), "messages", "11 prompt tokens and 502 new ones"),
        ((len(TOKENS),), FREE, "prompt_ids", f"vocabulary of {len(TOKENS)}"),
        ((-1,), FREE, "prompt_ids", "vocabulary"),
        (PROMPT, SamplingParams(forced_ids=(10**6,)), "prompt_ids", "vocabulary"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams, parameter: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        engine.add(Request("r", prompt, sampling))
    assert refused.value.parameter == parameter
    assert not engine.has_work


@pytest.mark.parametrize(
    ("changes", "parameter", "words"),
    [
        ({"choices": 0}, "n", "n is 0"),
        ({"generated_ids": (1,) * 12}, "generated_ids", "12 tokens of the 12"),
        ({"generated_ids": (10**6,)}, "prompt_ids", "vocabulary"),
        (
            {"generated_ids": (1, EOS), "sampling": SamplingParams()},
            "generated_ids",
            "ended already: its token 1",
        ),
        (
            {"generated_ids": (7, 8), "sampling": replace(FREE, stop_token_ids=(7,))},
            "generated_ids",
            "ended already: its token 0",
        ),
        ({"slack_ms": float("inf")}, "slack_ms", "slack_ms is inf"),
        ({"slack_ms": float("nan")}, "slack_ms", "slack_ms is nan"),
        ({"slack_ms": -1.0}, "slack_ms", "between 0 and"),
        ({"slack_ms": 1e308}, "slack_ms", "between 0 and"),
        ({"generated_ids": (1,), "resumed": (16,)}, "resumed", "resumed is"),
    ],
)
def test_what_goes_on_elsewhere_must_fit(
    engine: Engine, changes: dict[str, object], parameter: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        engine.add(replace(Request("r", PROMPT, FREE), **changes))
    assert refused.value.parameter == parameter
    assert not engine.has_work


def test_prompt_and_output_may_fill_every_position(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=512 - len(PROMPT), ignore_eos=True)
    assert len(finish(engine, [Request("r", PROMPT, sampling)])["r"]) == 512 - len(PROMPT)


def test_the_same_id_twice_is_refused(engine: Engine) -> None:
    engine.add(Request("r", PROMPT, FREE))
    with pytest.raises(InvalidRequest, match="'r' is already running"):
        engine.add(Request("r", PROMPT, FREE))


@pytest.mark.parametrize("again", [1, 2])
def test_an_id_is_taken_until_its_last_output_has_ended(engine: Engine, again: int) -> None:
    engine.add(Request("a", PROMPT, FREE, choices=2))
    engine.add(Request("other", PROMPT, FREE))
    engine.step()
    assert engine.abort("a", 0)
    with pytest.raises(InvalidRequest, match="'a' is already running"):
        engine.add(Request("a", PROMPT, FREE, choices=again))
    with pytest.raises(InvalidRequest, match="'a' is already running"):
        engine.fork("other", "a")
    engine.check_integrity()
    assert engine.abort("a")
    engine.add(Request("a", PROMPT, FREE))
    drain(engine)


def test_a_hand_off_of_a_request_whose_outputs_are_still_to_come_is_refused(
    engine: Engine, tiny_model: Path
) -> None:
    prefill = small_engine(tiny_model, role="prefill")
    prefill.add(Request("a", PROMPT, FREE, choices=3))
    first, *others = prefill.step().handoffs
    engine.add(Request("a", PROMPT, FREE, choices=3))
    with pytest.raises(InvalidRequest, match="'a' is already running"):
        engine.adopt(others[0])
    engine.abort("a")
    for handoff in (first, *others):
        engine.adopt(handoff)
    with pytest.raises(InvalidRequest, match="'a' is already running"):
        engine.adopt(first)
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def test_an_id_that_looks_like_another_requests_output_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="zero character"):
        engine.add(Request("a\0001", PROMPT, FREE))


def test_a_full_queue_refuses_and_recovers(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, max_waiting=2, max_sequences=1)
    engine.add(Request("a", PROMPT, FREE))
    engine.add(Request("b", PROMPT, FREE))
    with pytest.raises(Overloaded, match="2 requests are waiting") as refused:
        engine.add(Request("c", PROMPT, FREE))
    assert refused.value.exit_code == 4
    engine.step()
    engine.add(Request("c", PROMPT, FREE))
    assert drain(engine)[0].keys() == {"a", "b", "c"}


def test_a_fork_waits_in_no_full_queue(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, max_waiting=1, max_sequences=2)
    engine.add(Request("a", PROMPT, FREE))
    engine.step()
    engine.fork("a", "runs")  # at once: the queue does not matter
    engine.fork("a", "waits")
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        engine.fork("a", "refused")
    with pytest.raises(InvalidRequest, match="already running"):
        engine.fork("a", "waits")
    engine.check_integrity()
    assert drain(engine)[0].keys() == {"a", "runs", "waits"}


def test_a_cache_that_holds_no_block_is_refused(tiny_model: Path, cpu_library: Path) -> None:
    with pytest.raises(DockyardError, match="kv_cache_bytes 1048576 holds no block of 2097152 bytes"):
        small_engine(tiny_model, kv_cache_bytes=1 << 20, block_tokens=4096)


def test_a_small_cache_bounds_the_positions(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, kv_cache_bytes=1 << 20, block_tokens=300)
    assert engine.max_positions == 512
    assert small_engine(tiny_model, kv_cache_bytes=1 << 20, block_tokens=2000).max_positions == 512


def test_the_fingerprint_names_the_weights_and_not_the_file(
    tiny_model: Path, tmp_path: Path, cpu_library: Path
) -> None:
    data = tiny_model.read_bytes()

    def mark(content: bytes) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        path.write_bytes(content)
        return small_engine(path).fingerprint

    same = small_engine(tiny_model).fingerprint
    assert mark(data) == mark(data + b"padding") == same
    assert mark(data.replace(b"assistant", b"ASSISTANT")) == same  # in the chat template
    changed = bytearray(data)
    changed[-40] ^= 1  # in the last tensor, before its padding
    assert mark(bytes(changed)) != same
    base = write_tiny_gguf(tmp_path / "base.gguf", metadata={"llama.rope.freq_base": 5000.0})
    assert small_engine(base).fingerprint != same  # other KV of the same weights


def test_priority_goes_first(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, max_sequences=1)
    for name, priority in (("late", 5), ("middle", 0), ("first", -3)):
        engine.add(Request(name, PROMPT, FREE, priority))
    order: list[str] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step().tokens if output.finish_reason]
    assert order == ["first", "middle", "late"]


def test_a_long_prompt_of_high_priority_does_not_stop_those_that_decode(
    tiny_model: Path, cpu_library: Path
) -> None:
    engine = small_engine(tiny_model, token_budget=32)
    engine.add(Request("decoding", PROMPT, FREE))
    engine.step()
    engine.add(Request("long", PROMPT * 20, FREE, priority=-1))
    for _ in range(5):
        assert "decoding" in [output.request_id for output in engine.step().tokens]


@pytest.mark.parametrize("ids", [[], [0] * 513, [-1], [10**6]])
def test_logits_of_ids_that_the_model_does_not_take_are_refused(
    tiny_model: Path, cpu_library: Path, ids: list[int]
) -> None:
    with pytest.raises(InvalidRequest):
        load_model(str(tiny_model)).logits(ids)


def test_profiles_and_versions_take_no_hand_offs_of_each_other(
    tiny_model: Path, cpu_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, fast = (small_engine(tiny_model, profile=profile) for profile in ("exact", "fast"))
    assert exact.fingerprint != fast.fingerprint
    monkeypatch.setitem(NUMERICS, "exact", NUMERICS["exact"] + 1)
    assert small_engine(tiny_model).fingerprint != exact.fingerprint
