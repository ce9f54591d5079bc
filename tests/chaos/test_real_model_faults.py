"""The real model while a process of its cluster is killed: what was told stays, and what follows is what the model says."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from e2e.cli_server import LIMIT_S, serve
from e2e.real_model import Reference

from pagecast import Client, SamplingParams, resuming
from pagecast.types import Tokens

pytestmark = pytest.mark.chaos

PROMPTS = ("The capital of France is", "Once upon a time there was a", "def fibonacci(n):")
NUM_TOKENS = 48
BEFORE = 6
"""Tokens that every stream has when the process dies."""


@dataclass
class Reader:
    """One stream, and what it has brought. Raises AssertionError for a token that is lost or repeated."""

    prompt: str
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def read(self, client: Client) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        for event in client.stream(self.prompt, sampling, timeout=3 * LIMIT_S):
            if isinstance(event, Tokens):
                assert event.first_token_offset == len(self.ids)
                self.ids += event.token_ids
                self.text += event.text


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.mark.parametrize("role", ["worker", "scheduler", "frontend"])
def test_every_token_is_the_best_after_all_before_it(role: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own model of the file. Clients and cluster wait longer than they do by themselves for a process to be back: how
    long its start takes on a busy machine is not what is tested."""
    monkeypatch.setattr(resuming, "GIVE_UP_AFTER_S", 2.0 * LIMIT_S)
    readers = [Reader(prompt) for prompt in PROMPTS]
    words = ("--max-model-len", "512", "--dtype", "float32", "--resume-grace-s", str(3 * LIMIT_S))
    with serve(*words) as served, Client(served.address) as client, ThreadPoolExecutor(len(readers)) as pool:
        reading = [pool.submit(reader.read, client) for reader in readers]
        end = time.monotonic() + LIMIT_S
        while min(len(reader.ids) for reader in readers) < BEFORE:
            assert time.monotonic() < end and not any(future.done() for future in reading)
            time.sleep(0.002)
        served.children()[role][0].kill()
        assert max(len(reader.ids) for reader in readers) < NUM_TOKENS, "it died after the end"
        for future in reading:
            future.result(timeout=3 * LIMIT_S)
    for reader in readers:
        assert len(reader.ids) == NUM_TOKENS
        assert reference.complaint(reference.encode(reader.prompt), tuple(reader.ids)) == ""
        assert reader.text == reference.tokenizer.decode(reader.ids, skip_special_tokens=True)
