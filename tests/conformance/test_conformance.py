"""The conformance suite against a real model served by real processes, as `pagecast conformance` runs it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from e2e.cli_server import Served, serve

from pagecast.conformance import cases, runner
from pagecast.conformance.endpoint import Endpoint

NUM_SCHEMAS = 12
"""Of the random schemas; the command tries 200."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--dtype", "float32", "--max-num-seqs", "32", "--cpu-kv-gib", "0.5") as made:
        yield made


async def results(address: str) -> list[runner.Result]:
    async with Endpoint(address) as endpoint:
        chosen = [c if c.check != "schemas" else replace(c, data={**c.data, "count": NUM_SCHEMAS}) for c in cases.load(endpoint.model)]
        return [result async for result in runner.run(endpoint, chosen)]


@pytest.mark.timeout(1500)
def test_every_case_is_kept_and_none_is_left_out(served: Served) -> None:
    got = asyncio.run(results(served.address))
    assert [f"{r.case.group}: {r.case.name}: {r.remark}" for r in got if r.outcome == "failed"] == []
    skipped = {r.case.group for r in got if r.outcome == "skipped"}
    assert skipped <= {"tool_calls"}, "only the model's template may lack something"
    assert {r.case.check for r in got} == {*runner.CHECKS, "canary"}
