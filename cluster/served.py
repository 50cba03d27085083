"""The text side of a model out of its file or folder, by the path; reads no weights."""

import json
from pathlib import Path
from typing import Any, cast

from engine.chat.deepseek import load_format
from engine.chat.deepseek_form import DeepseekForm, missing_tokens
from engine.chat.deepseek_prompt import BEGIN
from engine.chat.deepseek_texts import Family
from engine.chat.deepseek_tokenizer import load_tokenizer
from engine.chat.template import ChatTemplate
from engine.chat.template_form import TemplateForm
from engine.chat.tokenizer import tokenizer_from_gguf
from engine.errors import BrokenModelFile
from engine.gguf_file import GgufFile, open_gguf
from gateway.service import ServedModel

_FAMILIES: dict[str, Family] = {"deepseek_v41": "v41", "deepseek_v4": "v4"}


def served_model(name: str, path: Path, max_positions: int) -> ServedModel:
    """Of a GGUF file, or of a DeepSeek model's folder. Raises BrokenModelFile.

    Blocks for a second where the vocabulary is large.
    """
    return (_of_folder if path.is_dir() else _of_file)(name, path, max_positions)


def _of_file(name: str, path: Path, max_positions: int) -> ServedModel:
    file = open_gguf(path)
    tokenizer = tokenizer_from_gguf(file)
    special = _special(file)
    source: object = file.metadata.get("tokenizer.chat_template")
    if source is None:
        form, no_chat = None, "its file has no chat template"
    elif isinstance(source, str):
        tokens = {key: token for key, (token, _) in special.items()}
        form, no_chat = TemplateForm(ChatTemplate(source, tokens), tokenizer), ""
    else:
        raise BrokenModelFile(f"{file.path}: 'tokenizer.chat_template' is no text")
    opens = file.metadata.get("tokenizer.ggml.add_bos_token") is True and "bos_token" in special
    opening = (special["bos_token"][1],) if opens else ()
    return ServedModel(name, tokenizer, form, max_positions, opening, no_chat)


def _special(file: GgufFile) -> dict[str, tuple[str, int]]:
    """The tokens that a template may name, by that name."""
    tokens = file.strings("tokenizer.ggml.tokens")
    special: dict[str, tuple[str, int]] = {}
    for name_of, key in (
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
    ):
        if (token := file.metadata.get(key)) is not None:
            if not isinstance(token, int) or not 0 <= token < len(tokens):
                raise BrokenModelFile(f"{file.path}: {key!r} is {token!r}, which is no token")
            special[name_of] = tokens[token], token
    return special


def _of_folder(name: str, path: Path, max_positions: int) -> ServedModel:
    chat_format = load_format(_family(path), path)
    tokenizer = load_tokenizer(path)
    missing = missing_tokens(chat_format, tokenizer)
    form = None if missing else DeepseekForm(chat_format, tokenizer)
    no_chat = f"its tokenizer has no token {missing[0]!r}" if missing else ""
    opening = tuple(tokenizer.encode(BEGIN)) if BEGIN in tokenizer.control else ()
    return ServedModel(name, tokenizer, form, max_positions, opening, no_chat)


def _family(folder: Path) -> Family:
    path = folder / "config.json"
    try:
        config: object = json.loads(path.read_bytes())
    except OSError as error:
        hint = "name a GGUF file, or a folder that has config.json, *.safetensors and tokenizer.json"
        raise BrokenModelFile(f"{path}: {error.strerror or error}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise BrokenModelFile(f"{path}: not JSON ({error})") from error
    kind = cast(dict[str, Any], config).get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise BrokenModelFile(
            f"{path}: model_type is {kind!r:.80}, which is not served",
            hint=f"folders of these are: {', '.join(_FAMILIES)}",
        )
    return _FAMILIES[kind]
