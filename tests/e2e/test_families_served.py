"""Every family through the whole gRPC chain: greedy tokens are those that transformers would choose, text in and text out."""

import json
from pathlib import Path

import pytest
import torch
from frontend.piece_files import sentencepiece_like, write_pieces
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from worker.family_model import write_family
from worker.gguf_model import write
from worker.quantized_files import FORMATS, write_quantized
from worker.tiny_model import write_tokenizer

from pagecast import LLM, Client, SamplingParams
from pagecast_scheduler.frontend.tokenizer import load_tokenizer
from pagecast_worker.models.registry import architectures

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TEXTS = ["a", "The capital of France is", "好" * 20]
TIE = 1e-4
MIXTURES = {
    "Qwen3MoeForCausalLM": {"mlp_only_layers": [], "num_experts": 6, "moe_intermediate_size": 128},
    "MixtralForCausalLM": {"num_local_experts": 4, "intermediate_size": 256},
}

pytestmark = pytest.mark.timeout(300)


@torch.inference_mode()
def behind(model: torch.nn.Module, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    """By how much the largest logit is above a token's, at most."""
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return float((logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())


@pytest.mark.parametrize("name", sorted(architectures()))
def test_greedy_tokens_through_the_whole_chain(tmp_path: Path, name: str) -> None:
    ranks = 2 if name == "Qwen3MoeForCausalLM" else 1
    folder, model = write_family(name, tmp_path, vocab_size=320)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "eos_token_id": 2}))
    options = {"dtype": "float32", "num_blocks": 24, "max_num_seqs": 4, "tensor_parallel_size": ranks, "check_invariants": True}
    with LLM(str(folder), **options) as llm, Client(llm.target) as client:
        prompts = [client.tokenize(text) for text in TEXTS]
        for prompt, output in zip(prompts, llm.generate(TEXTS, GREEDY), strict=True):
            tokens = output.outputs[0].token_ids
            assert len(tokens) == GREEDY.max_tokens and behind(model, tuple(prompt), tuple(tokens)) < TIE
        assert client.models()[0].architecture == name


@pytest.mark.parametrize(("form", "name", "ranks"), [("awq", "Qwen3MoeForCausalLM", (1, 2)), ("fp8 blocks", "MixtralForCausalLM", (2,))])
def test_quantized_experts_split_over_ranks(tmp_path: Path, form: str, name: str, ranks: tuple[int, ...]) -> None:
    """Held to transformers with the weights that the file means, and to each other."""
    folder, source = write_quantized(tmp_path, *FORMATS[form], name, vocab_size=320, num_hidden_layers=2, **MIXTURES[name])
    write_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found = []
    for size in ranks:
        options = {"dtype": "float32", "num_blocks": 24, "max_num_seqs": 4, "tensor_parallel_size": size, "check_invariants": True}
        with LLM(str(folder), **options) as llm, Client(llm.target) as client:
            prompts = [client.tokenize(text) for text in TEXTS]
            found.append([output.outputs[0].token_ids for output in llm.generate(TEXTS, GREEDY)])
            assert client.models()[0].quantization
    for outputs in found:
        for prompt, tokens in zip(prompts, outputs, strict=True):
            assert len(tokens) == GREEDY.max_tokens and behind(model, tuple(prompt), tuple(tokens)) < TIE
    assert all(outputs == found[0] for outputs in found)


def test_a_gguf_file_with_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Text in, chats in, text out, and output held to a grammar, all by the file's own pieces."""
    pieces = tmp_path / "pieces"
    sentencepiece_like(pieces, True, size=500)
    file = write(tmp_path / "tiny.gguf", tokenizer=lambda writer: write_pieces(writer, pieces, True, least=512))
    trained, own = Tokenizer.from_file(str(pieces / "tokenizer.json")), load_tokenizer(str(file))
    plain = lambda text: trained.encode(text, add_special_tokens=False).ids
    with LLM(str(file), dtype="float32", num_blocks=24, max_num_seqs=4, max_model_len=128) as llm, Client(llm.target) as client:
        for text in [*TEXTS, "  two spaces first"]:
            assert list(client.tokenize(text)) == [1, *plain(text)]
            assert client.detokenize(plain(text)) == text
        for output in llm.generate(TEXTS, GREEDY):
            tokens = output.outputs[0].token_ids
            assert len(tokens) == GREEDY.max_tokens
            assert output.outputs[0].text == own.decode(list(tokens))
        chat = llm.chat([{"role": "user", "content": "Hi there"}], GREEDY)[0].outputs[0].token_ids
        rendered = [*plain("[user] Hi there"), 2]
        assert chat in [llm.generate([ids], GREEDY)[0].outputs[0].token_ids for ids in (rendered, [1, *rendered])]
        choice = SamplingParams(temperature=1.0, max_tokens=16, choices=["good day", "你好"])
        assert llm.generate("a", choice)[0].outputs[0].text in ("good day", "你好")
