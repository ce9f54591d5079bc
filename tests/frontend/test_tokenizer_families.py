"""Tokenizers of every family's kind, small ones trained here: any text comes back exactly, from a .gguf file and from a folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from frontend.piece_files import CORPUS, sentencepiece_like, write_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pagecast.cli.sample_texts import CHINESE, CODE
from pagecast_scheduler.frontend.detokenizer import text_decoder
from pagecast_scheduler.frontend.tokenizer import BYTE_LEVEL_SPLITS, load_tokenizer

TEXTS = {
    "Chinese": CHINESE,
    "Japanese": "吾輩は猫である。名前はまだ無い。ﾊﾝｶｸ カタカナ、漢字とひらがな。",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 e\u0301 \u00e9",
    "code": CODE + "\t\tif (x != y) { return a->b; }  // ok\r\n\r\n",
    "control characters": "\x00\x01\x1b[0m\x7f\u200b\u202e\ufeff end",
    "spaces": "  a   b \n\n   c\t\t",
    "numbers": "2024 1234567 3.14159 १२३",
    "contractions": "I'LL don't 'tis we've",
}
SPECIAL = ["<s>", "</s>", "<|user|>"]
NFC = {"qwen2", "deepseek-r1-qwen"}


def byte_level(pre: str) -> Tokenizer:
    """A trained byte-level BPE of that split."""
    split = BYTE_LEVEL_SPLITS[pre]
    made = Tokenizer(models.BPE(ignore_merges=split.whole_words))
    if split.pattern:
        parts = [pre_tokenizers.Split(Regex(split.pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    if split.nfc:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def write_gguf(path: Path, trained: Tokenizer, pre: str) -> None:
    """The tokenizer's part of a .gguf file, and nothing else."""
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module", params=sorted(BYTE_LEVEL_SPLITS))
def from_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer, str]:
    trained = byte_level(request.param)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, trained, request.param)
    return load_tokenizer(str(path)), trained, request.param


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_splits_and_joins_as_its_kind_does(from_file: tuple[Any, Tokenizer, str], name: str) -> None:
    ours, trained, pre = from_file
    ids = ours.encode(TEXTS[name])
    assert ids == trained.encode(TEXTS[name]).ids
    want = TEXTS[name] if pre not in NFC else normalizers.NFC().normalize_str(TEXTS[name])
    assert ours.decode(ids) == want
    assert b"".join(ours.token_bytes[i] for i in ids).decode() == want


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(from_file: tuple[Any, Tokenizer, str], text: str) -> None:
    ours, trained, pre = from_file
    ids = ours.encode(text)
    assert ids == trained.encode(text).ids
    if pre not in NFC and not any(token in text for token in SPECIAL):
        assert ours.decode(ids) == text


@pytest.mark.parametrize("prefix", [True, False], ids=["Llama 2, Mistral", "Gemma"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_folder_of_pieces_gives_any_text_back(tmp_path: Path, prefix: bool, name: str) -> None:
    sentencepiece_like(tmp_path / "model", prefix)
    ours = load_tokenizer(str(tmp_path / "model"))
    ids = ours.encode(TEXTS[name])
    assert ours.decode(ids) == TEXTS[name]


@pytest.fixture(scope="module", params=[True, False], ids=["Llama 2, Mistral", "Gemma"])
def of_pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, bool]:
    """The tokenizer of a .gguf file, and that of the folder it was written from."""
    folder, file = tmp_path_factory.mktemp("pieces"), tmp_path_factory.mktemp("gguf") / "model.gguf"
    sentencepiece_like(folder, request.param)
    writer = gguf.GGUFWriter(file, "llama")
    write_pieces(writer, folder, request.param)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(str(file)), load_tokenizer(str(folder)), request.param


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_of_pieces_splits_and_joins_as_its_folder_does(of_pieces: tuple[Any, Any, bool], name: str) -> None:
    from_file, from_folder, _ = of_pieces
    ids = from_file.encode(TEXTS[name], add_special_tokens=False)
    assert ids == from_folder.encode(TEXTS[name], add_special_tokens=False)
    assert from_file.decode(ids) == TEXTS[name] and from_file.piece_bytes == from_folder.piece_bytes
    assert from_file.encode(TEXTS[name]) == [1, *ids]  # llama.cpp's default for this kind
    assert from_file.encode(f"</s>{TEXTS[name]}", add_special_tokens=False)[0] == 2


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_pieces(of_pieces: tuple[Any, Any, bool], text: str) -> None:
    from_file, from_folder, _ = of_pieces
    ids = from_file.encode(text, add_special_tokens=False)
    assert ids == from_folder.encode(text, add_special_tokens=False)
    if "\u2581" not in text and not any(token in text for token in ("<unk>", "<s>", "</s>")):
        assert from_file.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(of_pieces: tuple[Any, Any, bool], data: st.DataObject) -> None:
    """Also bytes that are no characters: what is out already stays, and nothing after it is lost."""
    from_file, _, _ = of_pieces
    ids = data.draw(st.lists(st.one_of(st.integers(0, 258), st.integers(259, from_file.backend.get_vocab_size() - 1)), max_size=24))
    decoder = text_decoder(from_file)
    streamed = "".join([*(decoder.push([i]) for i in ids), decoder.flush()])
    assert streamed == from_file.decode(ids)
    if "\ufffd" not in streamed:
        assert streamed == from_file.backend.decode(ids)
    names = [from_file.backend.id_to_token(i) for i in ids]
    shown = text_decoder(from_file, from_file.special_bytes())
    assert "".join([*(shown.push([i]) for i in ids), shown.flush()]) == from_file.decode(ids, skip_special_tokens=False)
    assert all(name in from_file.decode(ids, skip_special_tokens=False) for name in names if name in ("<s>", "</s>", "<unk>"))


def test_a_file_of_pieces_brings_its_template_and_needs_no_torch(of_pieces: tuple[Any, Any, bool], tmp_path: Path) -> None:
    from_file, _, prefix = of_pieces
    assert from_file.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert "[{{ m.role }}]" in from_file.template_source and from_file.chat_template is not None
    sentencepiece_like(tmp_path / "folder", prefix)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    write_pieces(writer, tmp_path / "folder", prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    code = (
        f"import sys; from pagecast_scheduler.frontend.tokenizer import load_tokenizer; print(load_tokenizer({str(file)!r}).encode('a b'));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pre", sorted(BYTE_LEVEL_SPLITS))
def test_a_folder_of_bytes_gives_any_text_back(tmp_path: Path, pre: str) -> None:
    trained = byte_level(pre)
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours = load_tokenizer(str(tmp_path))
    for text in TEXTS.values():
        want = text if pre not in NFC else normalizers.NFC().normalize_str(text)
        assert ours.decode(ours.encode(text)) == want
