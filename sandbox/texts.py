"""Text that goes into a sandbox as bytes, and what programs say. What is refused is named by its field, and
never shown: it may be a secret."""

from sandbox.arguments import check_type
from sandbox.errors import InvalidArgument


def one_line(text: str) -> str:
    """What a program has said, as a part of a message."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def utf8(field: str, data: bytes | str) -> bytes:
    """Content. InvalidArgument for text that UTF-8 does not have, and for what is neither text nor bytes."""
    check_type(field, data, str, bytes, bytearray, memoryview)
    if not isinstance(data, str):
        return data
    try:
        return data.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field}: character {error.start} is half of a surrogate pair, which UTF-8 does not have",
            hint="give bytes, encoded as they are to be",
        ) from None  # whose cause has the text


def system_bytes(field: str, text: str) -> bytes:
    """A word for the kernel: as Python has those of the system, which need not be UTF-8. InvalidArgument for
    what no system call takes."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{field} is no text but of type {type(text).__name__}")
    if "\0" in text:
        raise InvalidArgument(f"{field} has a NUL, which no system call takes")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} holds half of a surrogate pair, which no system call takes") from None
