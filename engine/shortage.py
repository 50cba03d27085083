"""Which errors say that there was no memory."""

import errno

_WORDS = "allocate memory", "out of memory", "std::bad_alloc"


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch and libraries in C++ say so in words alone: of allocators for the processor and for devices."""
    match error:
        case MemoryError():
            return True
        case RuntimeError():
            return any(words in str(error) for words in _WORDS)
        case OSError():  # of a process that cannot be started, say
            return error.errno == errno.ENOMEM
        case _:
            return False
