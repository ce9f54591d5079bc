"""`pagecast perplexity` beside transformers, and what the two commands for quantized models refuse."""

import json
import math

import pytest
import torch
from worker.family_model import write_family
from worker.smollm2 import tokenizer, transformers_model
from worker.tiny_model import write_tokenizer

from pagecast.cli import main, perplexity
from pagecast_worker.quantizing import run

TEXT = "The scheduler decides what each step computes. A worker applies plans in the order they come and decides nothing. " * 6


def test_perplexity_of_the_real_model_is_that_of_transformers(capsys, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    limits = ["--window", "48", "--max-tokens", "100"]
    assert main.main(["perplexity", "smollm2-135m", str(tmp_path / "text"), *limits, "--dtype", "float32", "--json"]) == 0
    tokens = tokenizer()(TEXT)["input_ids"][:100]
    losses = []
    with torch.inference_mode():
        for start in (0, 48, 96):
            ids = torch.tensor([tokens[start : start + 48]])
            logits = transformers_model()(ids).logits[0, :-1].float()
            losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    found = json.loads(printed)
    assert found["tokens"] == len(losses) == 97
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)


def test_windows_and_figures():
    assert perplexity.windows(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    found = perplexity.figures([[-1.0, -2.0], [-3.0]])
    assert found["perplexity"] == pytest.approx(math.exp(2.0)) and found["bits_per_token"] == pytest.approx(2.0 / math.log(2))
    assert found["standard_error"] == pytest.approx(math.exp(2.0) / math.sqrt(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perplexity", "smollm2-135m", "no-such-file"], "no-such-file: cannot be read"),
        (["quantize", "smollm2-135m", "out", "--to", "rtn-int4", "--calibration", "x"], "--calibration must not be given for rtn-int4"),
        (["quantize", "smollm2-135m", "out", "--to", "gptq", "--group-size", "48"], "must be 32, 64 or a multiple of 128, got 48"),
        (["quantize", "smollm2-135m", "out", "--to", "awq", "--calibration", "no-such-file"], "no-such-file: cannot be read"),
    ],
)
def test_refusals_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quantize_writes_a_folder_and_says_where(capsys, tmp_path):
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", hidden_size=128, intermediate_size=256, head_dim=32)
    assert main.main(["quantize", str(source), str(tmp_path / "out"), "--to", "rtn-int4", "--device", "cpu"]) == 0
    assert f"rtn-int4 checkpoint in {tmp_path / 'out'}" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").is_file()


def test_quantize_calibrates_on_as_many_pieces_of_a_text_as_it_is_told(capsys, tmp_path, monkeypatch):
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", hidden_size=128, intermediate_size=256, head_dim=32)
    write_tokenizer(source)
    (tmp_path / "text").write_text("words upon words " * 40)
    jobs = []
    monkeypatch.setattr(run, "quantize", lambda job, show: jobs.append(job))
    words = ["quantize", str(source), str(tmp_path / "out"), "--to", "gptq", "--device", "cpu", "--calibration", str(tmp_path / "text")]
    assert main.main([*words, "--samples", "3", "--sample-tokens", "16"]) == 0
    assert [len(piece) for piece in jobs[0].sequences] == [16, 16, 16]
    assert main.main([*words, "--sample-tokens", "100000"]) == 2
    assert "--calibration must have at least --sample-tokens 100000 tokens, got " in capsys.readouterr().err
