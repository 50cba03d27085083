"""The weights that an engine runs, and how they change: for others of the same shape, or in place."""

import re
from uuid import uuid4

from engine.cache.block_size import block_size
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.field_types import check_texts
from engine.model.base import Held, Model, State
from engine.model.registry import load_model
from protocol.errors import DockyardError, ResourceShortage

_NO_MEMORY = re.compile(r"allocate memory|size calculation overflowed")  # in torch's words
_DIGEST = re.compile(r"[0-9a-f]{16,128}")


class Weights:
    """Owned by the engine's thread. `state` has what is in flight, and goes with the model.

    `fingerprint` names the model and its version: hand-offs fit where it is equal.
    """

    def __init__(self, config: EngineConfig, model: Model | None = None) -> None:
        """`model`: loaded already, as the config has it; it stays its owner's to close.

        Raises UnknownModel, BrokenModelFile, MissingCapability; InvalidRequest where the cache is too small,
        or its blocks do not fit the model; ResourceShortage where it is too large for memory.
        """
        self._config, self._owns_model = config, model is None
        self.model: Model = model or _load(config, config.model)
        self.fingerprint = self.model.fingerprint
        self.block_tokens = block_size(config.block_tokens, self.model.entry_ratios)
        self.num_blocks = _blocks_in(config, self.model, self.block_tokens)
        self.state = self._new_state(self.model)
        self._labels: set[str] = set()  # versions that there have been

    @property
    def max_positions(self) -> int:
        """The longest prompt plus output that model and cache take."""
        return min(self.model.max_positions, self.num_blocks * self.block_tokens)

    def renew(self, label: str, model: str | None, digest: str) -> str:
        """Go on with others (`Engine.update_weights`); the version that goes into keys.

        Raises UnknownModel, BrokenModelFile, InvalidRequest; then all stays as it was.
        """
        check_texts(label, "version")
        if "#" in label:
            raise InvalidRequest(
                f"version is {label!r:.80}; '#' stands before the digest of weights changed in place",
                parameter="version", hint="name it without",
            )  # fmt: skip
        version = label
        if model is not None:
            self._replace(model)
        else:
            version = self._mark(label, digest)
        self._labels.add(label)
        self.fingerprint = self.model.fingerprint if not version else f"{self.model.fingerprint}@{version}"
        return version

    def bytes_of(self, held: Held) -> int:
        """Of a sequence's whole state."""
        return sum(rows * width for _, rows, width in self.state.layout(held))

    def close(self) -> None:
        if self._owns_model:
            self.model.close()

    def _mark(self, label: str, digest: str) -> str:
        """Of weights changed in place: of their digest where it is told, else of this engine alone."""
        if not label or label in self._labels:
            raise InvalidRequest(
                f"version is {label!r}; weights changed in place need one that this engine has not had",
                parameter="version",
            )
        if digest and not _DIGEST.fullmatch(digest):
            raise InvalidRequest(
                f"digest is {digest!r:.80}; it must be 16 to 128 lower-case hexadecimal digits",
                parameter="digest",
            )
        return f"{label}#{digest or uuid4().hex}"

    def _replace(self, name: str) -> None:
        """Nothing is taken over before all of it is there."""
        new = _load(self._config, name)
        try:
            self._check_like(new, name)
            state = self._new_state(new)
        except BaseException:
            new.close()
            raise
        old, self.model, self.state = self.model, new, state
        if self._owns_model:
            old.close()
        self._owns_model = True

    def _check_like(self, new: Model, name: str) -> None:
        """Raises InvalidRequest where engine, gateway or requests in flight would take it for another."""
        old = self.model
        if _shape(new) != _shape(old):
            raise InvalidRequest(f"the model {name!r} has another shape", parameter="model")
        if new.eos_ids != old.eos_ids:
            raise InvalidRequest(
                f"the model {name!r} ends outputs with the tokens {sorted(new.eos_ids)}, the one that runs "
                f"with {sorted(old.eos_ids)}",
                parameter="model", hint="start an engine of it",
            )  # fmt: skip
        if _tokens(new) != _tokens(old):
            raise InvalidRequest(
                f"the model {name!r} has other tokens", parameter="model", hint="start an engine of it"
            )

    def _new_state(self, model: Model) -> State:
        config = self._config
        try:
            return model.new_state(self.num_blocks, self.block_tokens, config.max_sequences)
        except (MemoryError, RuntimeError, OverflowError) as error:
            if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
                raise
            raise ResourceShortage(
                f"there is no memory for the caches: kv_cache_bytes is {config.kv_cache_bytes}, "
                f"max_sequences is {config.max_sequences}: {error or 'out of memory'}",
                hint="lower kv_cache_bytes, or max_sequences where each has windows, as in DeepSeek's models",
            ) from error


def _shape(model: Model) -> tuple[object, ...]:
    """What the engine's caches and rules were made for."""
    bytes_per_token = model.cache_bytes_per_token()
    return model.vocabulary, model.max_positions, bytes_per_token, model.resume_rules, model.entry_ratios


def _tokens(model: Model) -> list[bytes] | None:
    """The bytes of each; None of a folder without a tokenizer."""
    try:
        return model.tokenizer().token_bytes()
    except DockyardError:
        return None


def _load(config: EngineConfig, name: str) -> Model:
    return load_model(
        name, threads=config.threads, operations=config.operations, profile=config.profile,
        replay=config.replay, caches=config.caches,
    )  # fmt: skip


def _blocks_in(config: EngineConfig, model: Model, block_tokens: int) -> int:
    block_bytes = int(model.cache_bytes_per_token() * block_tokens)
    num_blocks = config.kv_cache_bytes // block_bytes
    if num_blocks == 0:
        raise InvalidRequest(
            f"kv_cache_bytes {config.kv_cache_bytes} holds no block of {block_bytes} bytes",
            parameter="kv_cache_bytes", hint=f"give at least {block_bytes}",
        )  # fmt: skip
    return num_blocks
