"""The byte-level BPE tokenizer that a GGUF file carries, run by the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.errors import BrokenModelFile
from engine.gguf_file import GgufFile

_CONTROL = 3  # GGML's token types: 1 normal, 3 control, 4 user defined
_USER_DEFINED = 4


class ChatTokenizer:
    """Text to ids and back. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        """Ids of the text; control tokens such as `<|im_start|>` are recognised. Adds none of its own."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without control tokens. An incomplete UTF-8 sequence decodes to U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


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
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    added = [AddedToken(token, normalized=False, special=True) for token in special]
    tokenizer.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    return ChatTokenizer(
        tokenizer, file.integer("tokenizer.ggml.eos_token_id", least=0, most=len(tokens) - 1)
    )


def _pair(file: GgufFile, merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not right:
        raise BrokenModelFile(f"{file.path}: tokenizer merge {merge!r} is not a pair")
    if left not in ids or right not in ids or left + right not in ids:
        raise BrokenModelFile(
            f"{file.path}: tokenizer merge {merge!r} names a token that is not in the vocabulary"
        )
    return left, right
