"""Text to token ids and back, with the model's own tokenizer.

Three sources: a Hugging Face folder (through transformers), a .gguf file (its tokenizer is rebuilt from the metadata, without
loading transformers or a tensor, where its kind is byte-level BPE or SentencePiece's; transformers does the rest), and `ByteTokenizer` for
engines without a model. `token_bytes` says what each
id is in bytes, which makes incremental decoding exact and cheap.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pagecast_scheduler.frontend import chat
from pagecast_scheduler.frontend.gguf_pieces import CONTROL, USER_DEFINED, pieces_backend
from pagecast_scheduler.frontend.sampling_rules import SamplingDefaults
from pagecast_scheduler.frontend.token_pieces import SPACE, joins_bytes, pieces_of
from pagecast_wire.gguf_metadata import read_metadata

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Split:
    """What a byte-level BPE does before it merges. pattern: how text is split, "" as GPT-2 does. nfc: text is normalised first.
    whole_words: a word that is in the vocabulary is taken whole, whatever the merges say. bos: the default for adding one."""

    pattern: str = ""
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = Split(_WORDS + "{1,3}" + _REST, whole_words=True, bos=True)
_QWEN2 = Split(_WORDS + _REST, nfc=True)
BYTE_LEVEL_SPLITS = {
    "smollm": Split(), "gpt-2": Split(), "default": Split(), "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "glm4": Split(_WORDS + "{1,3}" + _REST), "chatglm-bpe": Split(_WORDS + "{1,3}" + _REST),
}
"""By GGUF pre-tokenizer name; for any other name transformers is asked."""


class Tokenizer(Protocol):
    """What the services need of a tokenizer. All methods may be called from several threads."""

    defaults: SamplingDefaults
    chat_template: chat.ChatTemplate | None
    special_tokens: dict[str, str]
    token_bytes: list[bytes] | None
    piece_bytes: list[bytes] | None
    max_token_bytes: int | None
    digest: str
    strips_space: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Names of special tokens in the text become those tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids; ids that the tokenizer does not know are nothing."""

    def special_bytes(self) -> dict[int, bytes]:
        """Bytes of every special token's name, by id."""


def byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 bytes are themselves, the other 68 are U+0100, U+0101, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(slots=True, weakref_slot=True)
class ModelTokenizer:
    """A tokenizer of the tokenizers library with what a served model adds to it.

    token_bytes: bytes of each id with special tokens empty, or None where texts are more than the bytes of their tokens. strips_space:
    but for a space at the beginning, which is left out. piece_bytes: the same for showing single tokens, also where whole texts are
    decoded otherwise. max_token_bytes: most bytes of text that one id can stand for,
    or None when the tokenizer may change text before splitting it. digest: hex SHA-256 over tokenizer and template.
    """

    backend: Backend
    special_tokens: dict[str, str]
    template_source: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    chat_template: chat.ChatTemplate | None = field(init=False, default=None)
    token_bytes: list[bytes] | None = field(init=False, default=None)
    piece_bytes: list[bytes] | None = field(init=False, default=None)
    max_token_bytes: int | None = field(init=False, default=None)
    digest: str = field(init=False, default="")
    strips_space: bool = field(init=False, default=False)
    _special: dict[int, bytes] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.template_source:
            self.chat_template = chat.compile_template(self.template_source)
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            self.token_bytes = _byte_level_table(self.backend)
            if self.backend.normalizer is None:
                added = max((len(t.content.encode()) for t in self.backend.get_added_tokens_decoder().values()), default=1)
                self.max_token_bytes = max(added, max(map(len, self.token_bytes)))
        self.piece_bytes = pieces_of(self.backend) if self.token_bytes is None else self.token_bytes
        self.digest = _digest(self.backend.to_str(), self.template_source)
        if self.token_bytes is None:
            joins, self.strips_space = joins_bytes(self.backend)
            self.token_bytes = self.piece_bytes if joins else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        [made] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)  # `encode` stops all other threads
        ids: list[int] = made.ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids."""
        if self.token_bytes is None or isinstance(self.backend.decoder, decoders.ByteLevel):
            [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)  # nor does this stop other threads
            return str(text)
        shown, table = {} if skip_special_tokens else self.special_bytes(), self.token_bytes
        text = b"".join([shown.get(i) or (table[i] if i < len(table) else b"") for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def special_bytes(self) -> dict[int, bytes]:
        """Bytes of every special token's name, by id."""
        if self._special is None:
            added = self.backend.get_added_tokens_decoder()
            self._special = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        return self._special


def _digest(tokenizer: str, template: str | None) -> str:
    return hashlib.sha256("\0".join((tokenizer, template or "")).encode("utf-8", "surrogatepass")).hexdigest()


def _byte_level_table(backend: Backend) -> list[bytes]:
    """Bytes per id, as the byte-level decoder sees them; special tokens are empty."""
    alphabet = byte_alphabet()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes([alphabet[c] for c in token])
        except KeyError:
            table[token_id] = token.encode("utf-8", "replace")
    for token_id, added in backend.get_added_tokens_decoder().items():
        if added.special:
            table[token_id] = b""
    return table


class ByteTokenizer:
    """For engines without a model. Documented ids: 0 to 255 are those bytes; a higher id i is one character, 0x4E00 + (i - 256) % 20902.

    Encoding uses only the first 256 ids. There are no special tokens. Chat renders as "role: content" lines, with
    tools before them; calls are written as <tool_call>JSON</tool_call>.
    """

    TEMPLATE = (
        "{% if tools %}tools: {{ tools | tojson }}, called as <tool_call>JSON</tool_call>\n{% endif %}"
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def __init__(self, vocab_size: int = 1 << 17) -> None:
        self.defaults = SamplingDefaults()
        self.special_tokens: dict[str, str] = {}
        self.chat_template: chat.ChatTemplate | None = chat.compile_template(self.TEMPLATE)
        self.token_bytes: list[bytes] | None = [bytes([i]) for i in range(256)]
        self.token_bytes += [chr(0x4E00 + i % 20902).encode() for i in range(vocab_size - 256)]
        self.piece_bytes: list[bytes] | None = self.token_bytes
        self.max_token_bytes: int | None = 1
        self.digest = _digest(f"bytes {vocab_size}", self.TEMPLATE)
        self.strips_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The UTF-8 bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The bytes of the ids as UTF-8, with U+FFFD for what is not."""
        table = self.token_bytes or []
        return b"".join([table[i] if i < len(table) else b"" for i in ids]).decode("utf-8", "replace")

    def special_bytes(self) -> dict[int, bytes]:
        """None: no id is special."""
        return {}


def _gguf_byte_level(metadata: dict[str, Any], split: Split) -> Backend:
    """Byte-level BPE from GGUF metadata, as transformers builds it for that split."""
    alphabet = byte_alphabet()
    spelling = {byte: char for char, byte in alphabet.items()}
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {t if all(c in alphabet for c in t) else "".join(spelling[b] for b in t.encode()): i for i, t in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds) if kind == CONTROL and all(c in alphabet for c in t)]
    whole = [t for t, kind in zip(tokens, kinds) if kind == USER_DEFINED and t in vocab]
    return _with_special(backend, metadata, special, whole, split.bos)


def _gguf_pieces(metadata: dict[str, Any]) -> Backend:
    """SentencePiece's from GGUF metadata. Pieces that stand for spaces are found by merging, as text is changed before it is split."""
    backend, tokens = pieces_backend(metadata), metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds) if kind == CONTROL]
    whole = [t for t, kind in zip(tokens, kinds) if kind == USER_DEFINED and SPACE not in t]
    return _with_special(backend, metadata, special, whole, True)


def _with_special(backend: Backend, metadata: dict[str, Any], special: list[str], whole: list[str], bos: bool) -> Backend:
    """special, whole: tokens that are matched in text before anything else; bos: whether one is added where the file says nothing."""
    tokens = metadata["tokenizer.ggml.tokens"]
    special = special + [tokens[i] for i in _special_ids(metadata).values() if tokens[i] not in special]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens([AddedToken(t, normalized=False) for t in whole])
    first = _special_ids(metadata).get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", bos) else None
    last = _special_ids(metadata).get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token") else None
    if first is not None or last is not None:
        around = [tokens[i] for i in (first, last) if i is not None]
        single = [*([tokens[first]] if first is not None else []), "$A", *([tokens[last]] if last is not None else [])]
        ids = [(t, tokens.index(t)) for t in around]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return backend


def _pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    if not split.pattern:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_pattern = pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Ids of the named special tokens that the file has, by the names that chat templates use."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def load_gguf(path: Path) -> ModelTokenizer:
    """The tokenizer in a .gguf file. Raises GgufError, OSError, or what transformers raises for kinds it does not know."""
    metadata = read_metadata(path)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        backend = _gguf_pieces(metadata)
    elif kind == "gpt2" and pre in BYTE_LEVEL_SPLITS:
        backend = _gguf_byte_level(metadata, BYTE_LEVEL_SPLITS[pre])
    else:
        return _from_transformers(path.parent, path.name, SamplingDefaults())
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {name: tokens[token_id] for name, token_id in _special_ids(metadata).items()}
    return ModelTokenizer(backend, special, metadata.get("tokenizer.chat_template"))


def _from_transformers(folder: Path, gguf_file: str | None, defaults: SamplingDefaults) -> ModelTokenizer:
    """Whatever transformers makes of the folder or file; nothing is downloaded and no code of the folder runs."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_VERBOSITY", "error"), ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")):
        os.environ.setdefault(name, value)
    from transformers import AutoTokenizer

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, use_fast=True, **extra)
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    return ModelTokenizer(loaded.backend_tokenizer, special, template, defaults)


_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*tekken*", "merges*")


def load_folder(folder: Path) -> ModelTokenizer:
    """The tokenizer of a Hugging Face folder, with sampling defaults from its generation_config.json if it has one. Raises ValueError for
    a folder without any, and whatever transformers raises."""
    if not any(found for pattern in _TOKENIZER_FILES for found in folder.glob(pattern)):
        raise ValueError("the folder has no tokenizer.json or the like; take another model's with --tokenizer")
    defaults = SamplingDefaults()
    config = folder / "generation_config.json"
    if config.is_file():
        values = json.loads(config.read_text())
        known = {name: type(getattr(defaults, name))(values[name]) for name in SamplingDefaults.__slots__ if values.get(name) is not None}
        if values.get("do_sample") is False:
            known["temperature"] = 0.0
        defaults = SamplingDefaults(**known)
    return _from_transformers(folder, None, defaults)


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer for a model path; "" is the byte-level one."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each text is a batch of its own: a thread per core would be of no use
    if not model:
        return ByteTokenizer()
    path = Path(model)
    if not path.exists():
        raise FileNotFoundError("no such file or folder")
    return load_gguf(path) if path.is_file() else load_folder(path)
