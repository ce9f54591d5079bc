"""The gateway's own OpenAPI description turned against it: whatever fits it, or nearly does, gets an answer or OpenAI's error object."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from e2e.cli_server import LIMIT_S, Served, serve
from hypothesis import HealthCheck, given, settings

EXAMPLES = 25


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--http-port", "0", "--max-model-len", "128", "--num-blocks", "4096") as running:
        yield running


def test_no_request_breaks_the_gateway(served: Served) -> None:
    described = schemathesis.openapi.from_url(f"{served.http}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"}
    for operation in operations:

        @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            reply = case.call(timeout=LIMIT_S)
            if case.path == "/health" and reply.status_code == 503:
                return  # front ends that do not answer within its time, on a busy machine
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                error = reply.json()["error"]
                assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
                assert "Traceback" not in reply.text and "Error(" not in reply.text

        holds()


def test_it_answers_still(served: Served) -> None:
    reply = httpx.post(served.http + "/v1/completions", json={"prompt": [1], "max_tokens": 2, "ignore_eos": True}, timeout=LIMIT_S)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 2
