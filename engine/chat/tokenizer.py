"""The byte-level BPE tokenizer that a GGUF file carries, run by the `tokenizers` library."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.errors import BrokenModelFile, InvalidRequest
from engine.gguf_file import GgufFile

_CONTROL = 3  # GGML's token types: 1 normal, 3 control, 4 user defined
_USER_DEFINED = 4


class ChatTokenizer:
    """Text to ids and back. Thread-safe.

    `tokenizer` takes the strings of control tokens for text; `control` says which they are. `longest` is the
    number of characters of the longest token of text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_id: int, control: Mapping[str, int], longest: int) -> None:
        self._tokenizer = tokenizer
        self._control = dict(control)
        self._control_names = {index: name for name, index in control.items()}
        self._bytes: list[bytes] | None = None
        by_length = sorted(control, key=len, reverse=True)  # where two begin alike, the longer one counts
        self._split = re.compile(f"({'|'.join(map(re.escape, by_length))})" if control else "(?!)")
        self.eos_id = eos_id
        self.longest = longest

    @property
    def control(self) -> Collection[str]:
        """The strings of the control tokens."""
        return self._control.keys()

    def encode(self, text: str, *, omit: str = "") -> list[int]:
        """Ids of the text; control tokens such as `<|im_start|>` are recognised. Adds none of its own.

        `omit` is left out of the text, after the control tokens have been recognised.
        """
        ids: list[int] = []
        for part in self._split.split(text):
            if (control := self._control.get(part)) is not None:
                ids.append(control)
            elif part:
                ids += self.encode_text(part.replace(omit, "") if omit else part)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: `<|im_end|>` is ten characters in it, and no control token.

        Raises InvalidRequest for half a surrogate pair, which has no UTF-8.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            place = next((n for n, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if place is None:
                raise
            raise InvalidRequest(
                f"the text has half a surrogate pair: {text[max(place - 10, 0) : place + 10]!r}",
                parameter="text", hint="send whole characters",
            ) from error  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without control tokens. An incomplete UTF-8 sequence decodes to U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self) -> list[bytes]:
        """Of each id what it adds to decoded text; nothing for ids that are no text. Takes some 0.1 s."""
        texts = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder().keys()
        found = [b""] * (max(texts.values(), default=-1) + 1)
        for text, index in texts.items():
            if not self._is_hidden(index):
                found[index] = text.encode() if index in added else _bytes_of(text)
        return found

    def token_text(self, index: int) -> tuple[str, bytes]:
        """How a token is told of by itself, and its bytes. Control tokens have their names."""
        if (name := self._control_names.get(index)) is not None:
            return name, name.encode()
        if self._bytes is None:
            self._bytes = self.token_bytes()
        found = self._bytes[index] if index < len(self._bytes) else b""
        return found.decode(errors="replace"), found

    def _is_hidden(self, index: int) -> bool:
        """Whether decoding leaves the token out."""
        return index in self._control_names


def _bytes_of(token: str) -> bytes:
    """Of a byte-level token, which writes each byte as one character."""
    return b"".join(
        bytes((byte,)) if (byte := _BYTE_OF.get(character)) is not None else character.encode()
        for character in token
    )


def _byte_characters() -> dict[str, int]:
    """GPT-2's mapping: printable bytes stand for themselves, the others for the code points after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): b for n, b in enumerate(others)}}


_BYTE_OF = _byte_characters()


def tokenizer_from_gguf(file: GgufFile) -> ChatTokenizer:
    """Build the file's own tokenizer. Raises BrokenModelFile for a kind that is not supported."""
    kind, pre = file.require("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre != "smollm":
        raise BrokenModelFile(
            f"{file.path}: tokenizer {kind!r}/{pre!r} is not supported", hint="supported: gpt2/smollm"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    types = cast(object, file.require("tokenizer.ggml.token_type"))
    if not isinstance(types, list) or len(types := cast(list[object], types)) != len(tokens):
        raise BrokenModelFile(f"{file.path}: 'tokenizer.ggml.token_type' does not have one entry a token")
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(file, merge, ids) for merge in file.strings("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # pyright: ignore[reportAttributeAccessIssue] - the stubs declare the property read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = {t: ids[t] for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL and t}
    user_defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(_added(control, special=True))  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(_added(user_defined, special=False))  # pyright: ignore[reportUnknownMemberType]
    tokenizer.encode_special_tokens = True  # as text; ChatTokenizer finds them itself
    longest = max((len(token) for token in ids.keys() - control.keys()), default=1)
    eos_id = file.integer("tokenizer.ggml.eos_token_id", least=0, most=len(tokens) - 1)
    return ChatTokenizer(tokenizer, eos_id, control, longest)


def _added(tokens: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=special) for token in tokens]


def _pair(file: GgufFile, merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not right:
        raise BrokenModelFile(f"{file.path}: tokenizer merge {merge!r} is not a pair")
    if left not in ids or right not in ids or left + right not in ids:
        raise BrokenModelFile(
            f"{file.path}: tokenizer merge {merge!r} names a token that is not in the vocabulary"
        )
    return left, right
