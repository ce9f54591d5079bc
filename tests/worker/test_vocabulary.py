"""Vocabularies for structured output from each kind of source."""

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from worker.smollm2 import model_file, tokenizer

from pagecast_wire.constraints import grammar_of
from pagecast_wire.sampling import Constraint, ConstraintKind
from pagecast_worker.vocabulary import VocabularyError, load_vocabulary

TEXT = '{"größe": [1, 2], "日本": "🙂 ok"}'


def greedy_text(vocabulary: LLTokenizer, constraint: Constraint, end: int) -> str:
    """The text whose every token is the longest that the mask allows; the end token as soon as it may."""
    matcher, output = LLMatcher(vocabulary, grammar_of(constraint), log_level=0), []
    while True:
        assert len(output) < 60 and not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if end in allowed:
            return vocabulary.decode_bytes(output).decode()
        output.append(max(allowed.tolist(), key=lambda token: len(vocabulary.decode_bytes([token]))))
        assert matcher.consume_token(output[-1])


def test_a_byte_level_gguf_file_cuts_text_as_its_own_tokenizer_does():
    vocabulary = load_vocabulary(model_file(), 49152, [2])
    assert vocabulary.eos_tokens == [2] and vocabulary.vocab_size == 49152
    for text in (TEXT, "Hello world\n\n  def f(x):\n\treturn x + 1", "a  b   c 12345"):
        assert vocabulary.tokenize_str(text) == tokenizer()(text)["input_ids"]
        assert vocabulary.decode_bytes(vocabulary.tokenize_str(text)).decode() == text
    assert vocabulary.is_special_token(1) and not vocabulary.is_special_token(100)


def test_a_folder_with_a_tokenizer_json(tmp_path):
    """Logits that are wider than the vocabulary: what nobody knows can never be chosen."""
    tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path, 49_400, [2])
    assert vocabulary.vocab_size == 49_400
    assert vocabulary.tokenize_str(TEXT) == tokenizer()(TEXT)["input_ids"]
    choice = Constraint(ConstraintKind.CHOICES, '["größe 日本"]')
    assert greedy_text(vocabulary, choice, 2) == "größe 日本"


def test_a_sentencepiece_gguf_file(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581yes", "ye", "s", "no", '"', "{", "}"]
    types = [2, 3, 3, *[6] * 256, *[1] * 8]
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types}
    file = tmp_path / "pieces.gguf"
    file.touch()
    vocabulary = load_vocabulary(file, len(pieces) + 5, [2], fields.__getitem__)
    assert vocabulary.decode_bytes(vocabulary.tokenize_str(" yes ü")) == " yes ü".encode()
    for text in (" yes", "no", "ü {yes}"):
        assert greedy_text(vocabulary, Constraint(ConstraintKind.CHOICES, f'["{text}"]'), 2) == text


@pytest.mark.parametrize("kind", ["nothing", "broken", "no end", "unknown"])
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, kind):
    fields = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": [], "tokenizer.ggml.token_type": []}
    file = tmp_path / "some.gguf"
    file.touch()
    if kind == "broken":
        (tmp_path / "tokenizer.json").write_text("{")
    ends = [] if kind == "no end" else [2]
    with pytest.raises(VocabularyError) as raised:
        load_vocabulary(file if kind == "unknown" else tmp_path, 100, ends, fields.__getitem__)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)
