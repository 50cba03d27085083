"""What an engine's events tell: whoever adds them up knows what each medium holds."""

from pathlib import Path

import pytest
from engine_runs import drain, finish, forget_device, prompt, small_engine

from engine import Engine, Request, SamplingParams
from protocol.handoff import KvPayload
from protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

NEW = SamplingParams(max_tokens=6, ignore_eos=True)
HOST = {"host_bytes": 8 << 20}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of the tiny model's sixteen tokens


def test_events_tell_what_the_prefix_cache_holds(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16)
    finish(engine, [Request("r", prompt(40), NEW)])
    ((number, batch),) = engine.events_since(0)
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == prompt(40)[:32]
    assert len(stored.block_hashes) == 2
    assert engine.events_since(number + 1) == []
    forget_device(engine)
    ((_, batch),) = engine.events_since(number + 1)
    assert batch.events[0] == BlockRemoved(stored.block_hashes[::-1], "GPU")


def test_events_of_blocks_that_come_back_have_their_tokens(tiny_model: Path, cpu_library: Path) -> None:
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=HOST)
    finish(engine, [Request("r", prompt(100), NEW)])
    (*_, (number, _)) = engine.events_since(0)
    forget_device(engine)
    finish(engine, [Request("again", prompt(100), NEW)])
    assert engine.statistics().scheduler.loaded_blocks == 6
    told = [event for _, batch in engine.events_since(number + 1) for event in batch.events]
    (stored,) = (event for event in told if isinstance(event, BlockStored) and event.medium == "GPU")
    assert len(stored.block_hashes) == 6
    assert stored.token_ids == prompt(100)[:96]
    engine.close()


def test_events_tell_of_host_memory_and_disk(tiny_model: Path, cpu_library: Path, tmp_path: Path) -> None:
    """Whoever adds up events knows at any time what each medium holds."""
    tiers = {"host_bytes": 6 * BLOCK_BYTES, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=tiers)
    finish(engine, [Request(f"r{seed}", prompt(70, seed), NEW) for seed in range(3)])
    engine._residence.tiers.flush()
    held = added_up(engine)
    assert len(held["CPU"]) == 6 == engine.statistics().tiers.blocks.entries
    disk = engine.statistics().tiers.disk
    assert disk is not None
    assert len(held["STORAGE"]) == disk.entries > 6
    assert held["CPU"] <= held["STORAGE"] <= held["GPU"]
    engine.close()
    again = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=tiers)
    again._residence.tiers.flush()
    assert added_up(again) == {"GPU": set(), "CPU": set(), "STORAGE": held["STORAGE"]}
    again.update_weights("2", str(tiny_model))
    assert again.events_since(0)[-1][1].events == (AllBlocksCleared(),)
    again.close()


def added_up(engine: Engine) -> dict[str, set[bytes]]:
    """What is where, by all events so far."""
    held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for _, batch in engine.events_since(0):
        for event in batch.events:
            match event:
                case BlockStored():
                    assert bool(event.token_ids) == (event.medium == "GPU")
                    if event.medium == "GPU" and event.parent_block_hash is not None:
                        assert event.parent_block_hash in held["GPU"], "it follows what is not there"
                    held[event.medium or ""] |= set(event.block_hashes)
                case BlockRemoved():
                    assert set(event.block_hashes) <= held[event.medium or ""]
                    held[event.medium or ""] -= set(event.block_hashes)
                case AllBlocksCleared():
                    held = {medium: set() for medium in held}
    return held


def test_what_the_device_alone_forgets_is_elsewhere_still(
    tiny_model: Path, cpu_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no memory for a block that was to come: the device's may hold anything."""
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=HOST)
    finish(engine, [Request("r", prompt(100), NEW)])
    forget_device(engine)
    kept, import_block = added_up(engine)["CPU"], engine.state.import_block

    def short(block: int, payload: KvPayload) -> None:
        monkeypatch.setattr(engine.state, "import_block", import_block)
        raise MemoryError

    monkeypatch.setattr(engine.state, "import_block", short)
    engine.add(Request("again", prompt(100), NEW))
    assert engine.step().num_rows == 0
    held = added_up(engine)
    assert held["GPU"] == set(), "the one that failed is the first, and the others follow it"
    assert len(kept - held["CPU"]) == 1, "the one that could not be taken"
    drain(engine)
    engine.check_integrity()
    assert added_up(engine)["GPU"] >= kept
    engine.close()


def test_who_goes_on_follows_blocks_that_are_known(
    tiny_model: Path, cpu_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another whose block there was no memory for, and behind a cache that has been emptied."""
    engine = small_engine(tiny_model, kv_events=True, block_tokens=16, tiers=HOST)
    finish(engine, [Request("r", prompt(100), NEW)])
    forget_device(engine)
    engine.add(Request("stream", prompt(40, 1), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    before, import_block = added_up(engine)["GPU"], engine.state.import_block

    def short(block: int, payload: KvPayload) -> None:
        monkeypatch.setattr(engine.state, "import_block", import_block)
        raise MemoryError

    monkeypatch.setattr(engine.state, "import_block", short)
    engine.add(Request("again", prompt(100), NEW))
    assert engine.step().num_rows == 1, "the stream goes on"
    assert added_up(engine)["GPU"] == before
    assert engine.statistics().scheduler.preemptions == 1
    sequence = next(s for s in engine._scheduler.running if s.request.id == "stream")
    engine.pool.forget_blocks(sequence.blocks)
    assert not added_up(engine)["GPU"] & before
    drain(engine)
    assert added_up(engine)["GPU"] >= before
    engine.close()
