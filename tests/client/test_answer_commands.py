"""What `generate` and `chat` ask for and how they show it: several answers, log-probabilities, every sampling value by a flag."""

import argparse
import os
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
from client.fake_server import FakeServer
from client.test_commands import PAGECAST, pagecast

from pagecast.cli import arguments, generate
from pagecast.cli.answer import Answer, show
from pagecast.sampling import SamplingParams
from pagecast.types import Accepted, Alternative, PromptLogprobs, SequenceFinished, TokenLogprob, Tokens
from pagecast.v1 import generation_pb2 as pb

FLAGS = [
    "--n", "3", "--min-tokens", "2", "--stop-token-id", "7", "--stop-token-id", "8", "--include-stop", "--time-budget", "1.5",
    "--logit-bias", "5=-100", "--logit-bias", "6=2.5", "--allowed-token-id", "5", "--allowed-token-id", "9", "--bad-word", "no",
    "--bad-tokens", "1,2,3", "--logprobs", "2", "--prompt-logprobs", "0", "--special-tokens", "--no-parse-reasoning",
    "--template-arg", "enable_thinking=false", "--top-k", "4", "--top-p", "0.5", "--min-p", "0.25", "--temperature", "0.5", "--seed", "9",
    "--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.25", "--stop", "x", "--max-tokens", "8",
    "--ignore-eos", "--regex", "a+",
]  # fmt: skip


def test_every_flag_reaches_the_server(server: FakeServer) -> None:
    done = pagecast("generate", "hello", "--chat", "--quiet", "--target", server.target, *FLAGS)
    assert done.returncode == 0, done.stderr
    (spec,) = server.script.asked
    assert spec.sampling == pb.SamplingOptions(
        temperature=0.5, top_k=4, top_p=0.5, min_p=0.25, seed=9, num_sequences=3, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.25, logit_bias=[pb.TokenBias(token_id=5, bias=-100), pb.TokenBias(token_id=6, bias=2.5)],
        allowed_token_ids=pb.TokenIds(ids=[5, 9]), bad_words=["no"], bad_token_sequences=[pb.TokenIds(ids=[1, 2, 3])],
    )
    stopping = spec.stopping
    assert (stopping.max_output_tokens, stopping.min_output_tokens, list(stopping.stop_token_ids)) == (8, 2, [7, 8])
    assert list(stopping.stop_texts) == ["x"] and stopping.ignore_eos and stopping.include_stop_in_output
    assert (stopping.time_budget.seconds, stopping.time_budget.nanos) == (1, 500_000_000)
    output = spec.output
    assert output.HasField("logprobs") and output.logprobs.top_n == 2 and output.HasField("prompt_logprobs")
    assert output.skip_special_tokens is False and output.HasField("parse_reasoning") and output.parse_reasoning is False
    assert spec.constraint.regex == "a+" and dict(spec.chat.template_kwargs) == {"enable_thinking": False}


def test_there_is_a_flag_for_every_sampling_value() -> None:
    """A value that SamplingParams gains must be reachable, or be named here with its reason."""
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    plain = arguments.sampling(parser.parse_args(["x"]))
    assert plain == SamplingParams()
    given = arguments.sampling(parser.parse_args(["x", *FLAGS]))
    kinds = {"json_schema", "json_object", "choices", "grammar"}  # beside regex
    # Text is what is printed, and all positions of a prompt; tools are not offered by a flag.
    reasons = {"detokenize", "raw_bytes", "prompt_logprobs_positions", "parse_tool_calls"}
    assert {name for name in SamplingParams.__slots__ if getattr(given, name) == getattr(plain, name)} <= kinds | reasons


@pytest.mark.parametrize(("words", "said"), [
    (["--logit-bias", "5"], "must be a token id, = and a number, not '5'"),
    (["--bad-tokens", "1,x"], "must be token ids with commas between"),
    (["--template-arg", "a=yes"], "must be a name, = and JSON"),
    (["--template-arg", "a=1"], "goes with a conversation"),
    (["--time-budget", "0"], "must be more than 0 seconds"),
])
def test_what_a_flag_cannot_hold_is_said(server: FakeServer, words: list[str], said: str) -> None:
    done = pagecast("generate", "hello", "--target", server.target, *words)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # what Python does with bytes depends on the locale
@pytest.mark.parametrize("words", [["generate", "-"], ["generate", b"\xff"], ["chat"]])
def test_what_is_no_text_is_said(server: FakeServer, words: list[Any], errors: str) -> None:
    env = os.environ | {"PYTHONIOENCODING": f"utf-8:{errors}"}
    command = [*PAGECAST, *words, "--target", server.target]
    done = subprocess.run(command, capture_output=True, input=b"caf\xe9\n", timeout=120, env=env)
    assert (done.returncode, done.stderr) == (2, f"pagecast {words[0]}: what was given is not UTF-8 text\n".encode())
    assert server.script.asked == []


@pytest.mark.parametrize("words", [["generate", "foreign"], ["chat"]])
def test_what_a_terminal_has_no_letter_for_is_shown_by_its_number(server: FakeServer, words: list[str]) -> None:
    command = [*PAGECAST, *words, "--target", server.target]
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, input=b"foreign\n", timeout=120, env=env)
    assert done.returncode == 0 and done.stdout.splitlines()[0] == "é\\u8a9e".encode("latin-1"), done


class Replayed(list):
    """A stream of events that were made before."""

    def cancel(self) -> None:
        self.clear()


def accepted(n: int) -> Accepted:
    values: dict[str, Any] = dict.fromkeys(Accepted.__slots__)
    return Accepted(**values | {"effective": SimpleNamespace(n=n)})


def record(piece: bytes, value: float | None, *top: Alternative) -> TokenLogprob:
    return TokenLogprob(1, value, top, piece)


def ended(index: int) -> SequenceFinished:
    return SequenceFinished(9, index, "stop", None, None)  # type: ignore[arg-type]


def printed(events: list, capsys: pytest.CaptureFixture[str]) -> tuple[str, Answer]:
    answer = Answer()
    assert show(Replayed(events), answer, time.perf_counter())  # type: ignore[arg-type]
    return capsys.readouterr().out, answer


def test_several_answers_are_shown_whole_as_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        accepted(2), Tokens(2, 0, 0, (1,), "one "), Tokens(3, 1, 0, (5,), "other"), ended(1),
        Tokens(5, 0, 1, (2,), "answer"), ended(0),
    ]
    out, answer = printed(events, capsys)
    assert out == "[1] other\n[0] one answer\n"
    assert (answer.text, answer.num_tokens) == ("one answer", 3)


def test_log_probabilities_stand_behind_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    best = Alternative(3, -0.25, b" is")
    events = [
        accepted(1), PromptLogprobs(2, 0, (record(b"It", None), record(b" was", -2.0, best))),
        Tokens(3, 0, 0, (1, 2), 'a "b"', (record(b"a", -0.125, best), record(b"\xe2", -1.5))), ended(0),
    ]
    out, _ = printed(events, capsys)
    assert out.splitlines() == [
        '       -  "It"', ' -2.0000  " was"   " is" -0.2500', 'a "b"', ' -0.1250  "a"   " is" -0.2500', " -1.5000  b'\\xe2'",
    ]
