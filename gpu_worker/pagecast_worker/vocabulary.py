"""The model's vocabulary as llguidance wants it: what every id is in bytes, and how forced text is cut into tokens.

From a folder's tokenizer.json as it is. From a .gguf file a tokenizer.json of the common byte-level BPE is written out of the metadata;
of other kinds only the bytes are taken, and forced text is cut greedily. Neither transformers nor tokenizers is loaded.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from pagecast_wire.gguf_metadata import read_metadata

CONTROL, UNKNOWN, USER_DEFINED, BYTE = 3, 2, 4, 6
"""GGUF token types."""


Metadata = Callable[[str], Any]


class VocabularyError(ValueError):
    """The model brings no vocabulary that can be read. The text is for the operator."""


def load_vocabulary(model: Path, vocab_size: int, eos_token_ids: Sequence[int], metadata: Metadata | None = None) -> LLTokenizer:
    """vocab_size: of the model's logits, padding included. metadata: a .gguf file's, if it is open. Raises VocabularyError."""
    if not eos_token_ids:
        raise VocabularyError(f"{model}: no end token is known")
    ends = [token for token in eos_token_ids if token < vocab_size]
    try:
        if model.is_dir() and (model / "tokenizer.json").is_file():
            source: Any = (model / "tokenizer.json").read_text(encoding="utf-8")
        elif model.suffix == ".gguf" and model.is_file():
            source = _of_gguf(model, metadata or _read_metadata(model), ends[0])
        else:
            raise VocabularyError(f"{model}: neither a .gguf file nor a folder with a tokenizer.json")
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        if isinstance(error, VocabularyError):
            raise
        raise VocabularyError(f"{model}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None


def _read_metadata(path: Path) -> Metadata:
    fields = read_metadata(path)
    return lambda key: fields[key]


def _of_gguf(path: Path, metadata: Metadata, eos_token_id: int) -> Any:
    kind, tokens, types = (metadata(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    if kind == "gpt2":
        return _byte_level_json(tokens, types, metadata("tokenizer.ggml.merges"))
    if kind == "llama":
        return _Pieces(tokens, types, eos_token_id)
    raise VocabularyError(f"{path}: tokenizer.ggml.model {kind} is not known")


def _byte_level_json(tokens: list[str], types: list[int], merges: list[str]) -> str:
    """A tokenizer.json, as far as llguidance reads it."""
    added = [
        {"id": i, "content": token, "special": kind == CONTROL, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges, "dropout": None, "unk_token": None,
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
    }  # fmt: skip
    return json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level,
         "post_processor": None, "decoder": byte_level, "model": model}
    )  # fmt: skip


class _Pieces:
    """A SentencePiece vocabulary in the shape of llguidance's own wrapper: a space is written as U+2581, <0xXX> is a byte."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[str], types: list[int], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = [i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)]
        self.tokens = [
            bytes([int(token[3:5], 16)]) if kind == BYTE else token.replace("\u2581", " ").encode()
            for token, kind in zip(tokens, types, strict=True)
        ]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special and token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The longest token that fits, again and again."""
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    break
            else:
                size = 1  # a byte that the vocabulary does not have
            at += size
        return ids
