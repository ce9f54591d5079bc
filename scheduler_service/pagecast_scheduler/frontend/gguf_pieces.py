"""The SentencePiece tokenizer of a .gguf file ("llama": Llama 2, Mistral, Gemma), rebuilt without transformers and without torch.

Files hold a score for each piece and seldom merges: two neighbours are joined whose piece has the highest score, so every way to cut a
piece in two is a merge, in the order of the pieces' scores.
"""

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pagecast_scheduler.frontend.token_pieces import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""GGUF token types. Control tokens and user-defined ones are matched whole in text; the former are special (hidden in output)."""


def merges_of(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Pairs of pieces to join, best first; of equal scores the lower id's first."""
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    merges: list[tuple[str, str]] = []
    for place in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[place]
        if token in known:
            merges += [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in known and token[cut:] in known]
    return merges


def pieces_backend(metadata: dict[str, Any]) -> Backend:
    """The tokenizer without its special tokens. Raises KeyError for a file that lacks what it takes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    merges = merges or merges_of(tokens, metadata["tokenizer.ggml.scores"], kinds)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)])
    joins = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*joins, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend
