"""What every process writes at its most talkative level: JSON lines with request ids, and nothing of what was asked or answered."""

import json
import signal

import pytest
from e2e.cli_server import serve

from pagecast import Client, SamplingParams
from pagecast.errors import InvalidRequest
from pagecast.types import Tokens

PROMPT = "what nobody may find in a log: amethyst"
STOP = "a stop text nobody may find: beryl"
SCOPE = "a-scope-of-carnelian"


def test_prompts_and_answers_are_in_no_log() -> None:
    """With refusals, a cancelled stream and the death of a worker, whose lines are the likeliest to say too much."""
    oracle = ("--executor", "oracle", "--oracle-vocab-size", "2048", "--oracle-step-us", "1000")
    with serve(*oracle, "--log-level", "debug") as served:
        params = SamplingParams(temperature=1, seed=5, max_tokens=600, stop=[STOP], ignore_eos=True)
        with Client(served.address) as client:
            whole = client.generate(PROMPT, params, request_id="the-whole-one", cache_scope=SCOPE)
            with client.stream(PROMPT, params, request_id="the-cancelled-one") as stream:
                next(event for event in stream if isinstance(event, Tokens))
            with pytest.raises(InvalidRequest):
                client.generate(PROMPT, SamplingParams(max_tokens=10**6))
            with client.stream(PROMPT, params, request_id="the-surviving-one") as stream:
                events = iter(stream)
                next(event for event in events if isinstance(event, Tokens))
                served.children()["worker"][0].send_signal(signal.SIGKILL)
                assert "".join(event.text for event in events if isinstance(event, Tokens))
        assert served.end() == 0
    log = "".join(served.lines)
    records = [json.loads(line) for line in served.lines]
    ended = {record["request_id"]: record for record in records if record["event"] == "request ended"}
    assert {"the-whole-one", "the-cancelled-one", "the-surviving-one"} <= set(ended)
    assert ended["the-whole-one"]["output_tokens"] == 600
    assert any(record["event"] == "rank lost" for record in records)
    (death,) = (record for record in records if record["event"] == "process ended")
    assert (death["name"], death["why"], death["level"]) == ("worker-0", "exit code -9", "error")
    writers = {record.get("process") for record in records}
    assert writers == {"supervisor", "scheduler", "frontend", "worker"}, "a line does not say who wrote it"
    answer = whole.sequences[0].text
    ids = ", ".join(map(str, PROMPT.encode()[-8:]))
    for secret in ("amethyst", "beryl", "carnelian", ids, ids.replace(" ", ""), answer[100:112], repr(answer[100:112])[1:-1]):
        assert secret not in log, secret
