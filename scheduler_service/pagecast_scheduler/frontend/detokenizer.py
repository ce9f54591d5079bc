"""Token ids to text, piece by piece, and stop texts across token edges.

Every piece is complete UTF-8, and the joined pieces equal the decoding of all ids: an incomplete character is held back until
its bytes are there, and replaced by U+FFFD only when the next bytes, or the very end, show that it never will be.
"""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Protocol

from pagecast_scheduler.frontend.tokenizer import Tokenizer

Ids = Sequence[int]


class TextDecoder(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, ids: Ids) -> str:
        """The text that these next ids complete."""

    def flush(self) -> str:
        """What the end of the sequence still releases."""


class ByteDecoder:
    """For tokenizers whose ids are plain bytes: exact, and a table look-up per token. shown: bytes of ids that differ from the table.

    strips_space: a space at the very beginning is left out.
    """

    def __init__(self, token_bytes: list[bytes], shown: Mapping[int, bytes] | None = None, strips_space: bool = False) -> None:
        self._table = token_bytes
        self._shown = shown or {}
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._strips_space = strips_space

    def push(self, ids: Ids) -> str:
        if self._strips_space:
            text = self._text(ids)
            self._strips_space = not text
            return text.removeprefix(" ")
        return self._text(ids)

    def _text(self, ids: Ids) -> str:
        if self._shown:
            return self._decode(b"".join([self._bytes_of(i) for i in ids]))
        table = self._table
        try:
            return self._decode(b"".join([table[i] for i in ids]))
        except IndexError:  # ids of a padded vocabulary that the tokenizer has no text for
            return self._decode(b"".join([table[i] for i in ids if i < len(table)]))

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._shown.get(token_id)
        if known is not None:
            return known
        return self._table[token_id] if token_id < len(self._table) else b""

    def flush(self) -> str:
        return self._decode(b"", True)


REPLACED = "\ufffd"
MOST_HELD = 8
"""Tokens that may wait for others before what is certain of them is released; the bytes of a character come in four at most."""
CHARACTER = 4
"""Tokens that hold the bytes of one character at least."""


class WindowDecoder:
    """For every other tokenizer: decodes a short window of ids twice, with and without the new ones, and releases the difference.

    The window begins where text was last released, with the ids of that release before it, because such decoders treat the
    first token of a text specially. Text that ends in U+FFFD may be an incomplete character and waits, but not for ever: of a run that is
    no text only the last character can still change. Special tokens are nothing, unless shown: those stand for their name, and each
    ends the text before it.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> None:
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._hidden = tokenizer.special_bytes().keys() - self._shown.keys()
        self._window: list[int] = []
        self._num_known = 0
        self._released = ""

    def push(self, ids: Ids) -> str:
        pieces = []
        for token_id in ids:
            if token_id in self._shown:
                pieces += [self.flush(), self._shown[token_id].decode("utf-8", "replace")]
            elif token_id not in self._hidden:
                self._window.append(token_id)
                pieces.append(self._step())
        return "".join(pieces)

    def _step(self) -> str:
        text = self._tokenizer.decode(self._window)
        is_full = len(self._window) - self._num_known >= MOST_HELD
        if text.endswith(REPLACED) or not text.startswith(self._released):
            return self._cut() if is_full else ""
        piece = text[len(self._released) :]
        if piece:
            self._window = self._window[self._num_known :]
            self._num_known = len(self._window)
            self._released = self._tokenizer.decode(self._window)
        elif is_full:  # ids that stand for nothing
            del self._window[self._num_known or MOST_HELD - 1 :]
        return piece

    def _cut(self) -> str:
        """Releases all but a last character that may be incomplete, and goes on from the few ids that this one can be made of."""
        piece, kept = self._held(), self._window[-CHARACTER:]
        again = self._tokenizer.decode(kept)
        waits = piece.endswith(REPLACED) and again.endswith(REPLACED)
        self._window, self._num_known = kept, len(kept) - waits
        self._released = again[:-1] if waits else again
        return piece[:-1] if waits else piece

    def _held(self) -> str:
        """The text that is not released yet. Where what is no longer fits before it, it stays, and its ids are left out."""
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._released):
            return text[len(self._released) :]
        return self._tokenizer.decode(self._window[self._num_known :])

    def flush(self) -> str:
        piece = self._held()
        self._window, self._num_known, self._released = [], 0, ""
        return piece


def text_decoder(tokenizer: Tokenizer, shown: Mapping[int, bytes] | None = None) -> TextDecoder:
    """The incremental decoder that fits the tokenizer. shown: special tokens that are not hidden, with their bytes."""
    if tokenizer.token_bytes is None:
        return WindowDecoder(tokenizer, shown)
    return ByteDecoder(tokenizer.token_bytes, shown, tokenizer.strips_space)


def _failure_table(text: str) -> list[int]:
    """Knuth-Morris-Pratt: entry n is the length of the longest proper prefix of text[:n] that is also its suffix."""
    table = [0] * (len(text) + 1)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length]
        if text[i] == text[length]:
            length += 1
        table[i + 1] = length
    return table


class StopMatcher:
    """Finds the first stop text to be completed in a stream of characters, however the stream is cut.

    The first to be completed wins; of several completed by one character, the longest. One KMP automaton per stop text makes a
    character cost O(number of stop texts), whatever the texts are.
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stops = sorted(stop_texts, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of the stream that may be the beginning of a stop text."""
        return max(self._lengths)

    def push(self, text: str, counts: bool) -> tuple[int, str] | None:
        """Feeds text. Where a stop text is completed and `counts`: (characters of `text` used, the stop text), nothing fed after it."""
        if not any(self._lengths) and self._first.isdisjoint(text):
            return None
        for used, char in enumerate(text, 1):
            matched = self._advance(char)
            if matched is not None and counts:
                return used, matched
        return None

    def _advance(self, char: str) -> str | None:
        matched = None
        for i, stop in enumerate(self._stops):
            length, failure = self._lengths[i], self._failures[i]
            while length and stop[length] != char:
                length = failure[length]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                matched = matched or stop
                length = failure[length]
            self._lengths[i] = length
        return matched


class Detokenizer:
    """Text of one sequence with stop texts applied: `push` tokens, get text that will never be taken back.

    matched: the stop text that ended the sequence, or None. keep: number of tokens up to and including the one that completed
    it. A stop text that is completed before the sequence holds min_tokens tokens is ordinary text. After a match nothing more comes.
    The text ends before the stop text, or with it (include_stop). shown: special tokens that are not hidden, with their bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_texts: Sequence[str] = (), min_tokens: int = 0, *, include_stop: bool = False,
        shown: Mapping[int, bytes] | None = None,
    ) -> None:
        self._decoder = text_decoder(tokenizer, shown)
        self._include_stop = include_stop
        self._matcher = StopMatcher(stop_texts) if stop_texts else None
        self._min_tokens = min_tokens
        self._pending = ""
        self._num_tokens = 0
        self.matched: str | None = None
        self.keep = 0

    def push(self, ids: Ids) -> str:
        """Text that these next ids release."""
        if self._matcher is None:
            return self._decoder.push(ids)
        pieces = []
        for token_id in ids:
            if self.matched is not None:
                break
            self._num_tokens += 1
            pieces.append(self._filter(self._decoder.push((token_id,))))
        return "".join(pieces)

    def flush(self) -> str:
        """What the end of the sequence releases; call once, after the last token."""
        if self._matcher is None:
            return self._decoder.flush()
        if self.matched is not None:
            return ""
        text = self._filter(self._decoder.flush())
        if self.matched is None:
            text, self._pending = text + self._pending, ""
        return text

    def _filter(self, text: str) -> str:
        """Adds text to what is pending and gives back the part that can no longer belong to a stop text."""
        matcher = self._matcher
        assert matcher is not None
        found = matcher.push(text, counts=self._num_tokens >= self._min_tokens)
        if found is not None:
            used, self.matched = found
            self.keep = self._num_tokens
            shown = self._pending + text[:used]
            self._pending = ""
            return shown if self._include_stop else shown[: len(shown) - len(self.matched)]
        shown = self._pending + text
        release = len(shown) - matcher.held
        self._pending = shown[release:]
        return shown[:release]
