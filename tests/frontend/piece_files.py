"""Tokenizers as SentencePiece makes them, trained on a few texts: as a folder, and as a .gguf file says it."""

import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from pagecast.cli.sample_texts import CHINESE, CODE, ENGLISH

CORPUS = [CHINESE, ENGLISH, CODE, "吾輩は猫である。名前はまだ無い。", "12345 67 890 1,000,000"] * 3


def sentencepiece_like(folder: Path, prefix: bool, size: int = 900) -> None:
    """A BPE over characters with bytes to fall back on, as Llama 2 and Mistral (prefix) and Gemma (none) have it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    joins = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    made.decoder = decoders.Sequence(joins)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, special_tokens=pieces, show_progress=False))
    text = json.loads(made.to_str())
    text["added_tokens"] = [token for token in text["added_tokens"] if token["id"] < 3]
    made = Tokenizer.from_str(json.dumps(text))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')


def write_pieces(writer: gguf.GGUFWriter, folder: Path, prefix: bool, least: int = 0) -> None:
    """What a file says of that folder's tokenizer: pieces, and scores in place of merges. least: tokens there have to be."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    scores = {"".join(merge): -float(place) for place, merge in reversed(list(enumerate(model["merges"])))}
    unused = [f"<unused{place}>" for place in range(len(pieces), least)]
    kinds = [2 if place == 0 else 3 if place < 3 else 6 if piece.startswith("<0x") else 1 for place, piece in enumerate(pieces)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + unused)
    writer.add_token_scores([scores.get(piece, -1e6) for piece in pieces] + [-1e6] * len(unused))
    writer.add_token_types(kinds + [5] * len(unused))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if not prefix:
        writer.add_add_space_prefix(False)
    writer.add_chat_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}")
