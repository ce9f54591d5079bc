"""What single tokens stand for, where a tokenizer's decoder is not plain byte-level: SentencePiece's way of writing, with or without
bytes for what it has no piece for. Good for showing tokens one by one. Whole outputs are decoded by the tokenizer itself, which treats
the beginning of a text specially, unless it falls back on bytes: one byte that is no character would then change the text of those
before it, which are out already, so such outputs are decoded as the bytes that they are."""

import json
from typing import Any

from tokenizers import Tokenizer as Backend

SPACE = "▁"


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder, as its description has them."""
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def joins_bytes(backend: Backend) -> tuple[bool, bool]:
    """Whether an output is the bytes of its tokens and nothing else, and whether a space at its beginning is then left out."""
    steps = _steps(json.loads(backend.to_str())["decoder"])
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    known = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return steps in (known, [*known, strip]), strip in steps


def pieces_of(backend: Backend) -> list[bytes] | None:
    """Bytes of each id, special tokens empty; None for a decoder that does not write spaces as SentencePiece does."""
    steps = _steps(json.loads(backend.to_str())["decoder"])
    writes_spaces = any(
        step["type"] == "Metaspace" or (step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == " ")
        for step in steps
    )
    if not writes_spaces:
        return None
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        is_byte = has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        table[token_id] = bytes.fromhex(token[3:5]) if is_byte else token.replace(SPACE, " ").encode("utf-8", "replace")
    for token_id, added in backend.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table
