"""Which errors say that there was no memory."""

_WORDS = "allocate memory", "out of memory", "std::bad_alloc"


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch and libraries in C++ say so in words alone: of allocators for the processor and for devices."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
    )
