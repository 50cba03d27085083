"""What a decoding step reads, against the model's file; and that the buffer is read whole."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench.bandwidth import StepBytes, bytes_of_step, ways_to_read
from engine.gguf_file import open_gguf
from engine.model_path import model_path


def test_a_step_reads_what_the_file_holds_and_one_row_of_the_embedding():
    """The embedding is the head too, and packed rows take no byte more than the file's."""
    file = open_gguf(model_path("smollm2"))
    stored = sum(tensor.data.nbytes for tensor in file.tensors.values())
    found = bytes_of_step()
    channels = file.integer("llama.embedding_length")
    assert found.weights == stored + 4 * channels
    assert found.kv_a_position == 30 * 2 * 3 * 64 * 4


def test_keys_and_values_grow_with_the_positions():
    assert StepBytes(1000, 10).at(7) == 1070


def test_every_way_reads_the_whole_buffer():
    buffer = np.arange(1001, dtype=np.int64)
    with ThreadPoolExecutor(2) as pool:
        by_numpy, _, by_torch, highest = (way() for way in ways_to_read(buffer, pool, 2))
    assert sum(by_numpy) == int(by_torch) == 1000 * 1001 // 2
    assert int(highest) == 1000
