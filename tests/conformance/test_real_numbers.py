"""Log-probabilities and penalties, through the whole chain, beside transformers in float32."""

from collections import Counter
from typing import Any

import pytest
from e2e.cli_server import Served
from e2e.real_model import PROMPTS, Reference

from pagecast import Client, SamplingParams

CLOSE = 1e-3
NUM_TOKENS = 16
NAMES = ("fact", "chinese question", "emoji", "python", "numbers")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def logits_of(reference: Reference, ids: list[int]) -> Any:
    """float64 logits after each of the ids, [len(ids), vocab]."""
    import torch

    with torch.inference_mode():
        return reference._model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(served: Served, reference: Reference, name: str) -> None:
    prompt = list(reference.encode(PROMPTS[name]))
    wanted = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    with Client(served.address) as client:
        got = client.generate(prompt, wanted)
    output = got.sequences[0]
    table = logits_of(reference, [*prompt, *output.token_ids]).log_softmax(-1)
    records = [*got.prompt_logprobs[1:], *output.logprobs]
    assert len(records) == len(prompt) - 1 + NUM_TOKENS and got.prompt_logprobs[0].logprob is None
    for at, record in enumerate(records):
        assert record.logprob == pytest.approx(float(table[at, record.token_id]), abs=CLOSE)
        best = table[at].topk(len(record.top)).values.tolist()
        assert [t.logprob for t in record.top] == pytest.approx(best, abs=CLOSE)
        for t in record.top:
            assert t.logprob == pytest.approx(float(table[at, t.token_id]), abs=CLOSE)


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition rewarded": {"repetition_penalty": 0.7},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "all and a bias": {"presence_penalty": 0.4, "frequency_penalty": -0.3, "repetition_penalty": 1.2, "logit_bias": {260: 2.0, 28: -100.0}},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalised_tokens_are_those_of_a_float64_reference(served: Served, reference: Reference, name: str) -> None:
    import torch

    values = PENALTIES[name]
    prompt = list(reference.encode(PROMPTS["story"]))
    with Client(served.address) as client:
        ids = list(client.generate(prompt, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, **values)).token_ids)
    raw = logits_of(reference, [*prompt, *ids])
    changed = 0
    for step, token in enumerate(ids):
        logits = raw[len(prompt) - 1 + step].clone()
        counts, repetition = Counter(ids[:step]), values.get("repetition_penalty", 1.0)
        for seen in {*prompt, *counts}:
            logits[seen] = logits[seen] / repetition if logits[seen] > 0 else logits[seen] * repetition
        for seen, count in counts.items():
            logits[seen] -= values.get("presence_penalty", 0.0) + count * values.get("frequency_penalty", 0.0)
        for biased, bias in values.get("logit_bias", {}).items():
            logits[biased] += bias
        assert float(logits.max() - logits[token]) <= CLOSE, f"token {step}"
        changed += int(torch.argmax(raw[len(prompt) - 1 + step]) != token)
    assert changed, "the penalties changed nothing: this test cannot fail"
