"""The conformance suite against a real model served by real processes, as `pagecast conformance` runs it; and the command itself."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from e2e.cli_server import Served, pagecast

from pagecast.conformance import cases, runner
from pagecast.conformance.endpoint import Endpoint

NUM_SCHEMAS = 12
"""Of the random schemas; the command tries 200."""


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


def test_the_command_reports_and_exits_by_what_it_found(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = pagecast("conformance", "--target", served.address, "--group", "malformed", "--group", "request_ids", "--json", str(report))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "conformant", done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert {row["outcome"] for row in rows} == {"passed"} and len(rows) > 10
    unknown = pagecast("conformance", "--target", served.address, "--group", "nothing")
    assert unknown.returncode == 2 and "no group 'nothing'" in unknown.stderr
    listed = pagecast("conformance", "--list")  # asks no server
    assert listed.returncode == 0 and "bad_inputs: no prompt" in listed.stdout.splitlines()
    nobody = pagecast("conformance", "--target", "127.0.0.1:9", "--group", "malformed")
    assert nobody.returncode == 1 and len(nobody.stderr.splitlines()) == 1


def test_generate_has_the_constraints(served: Served, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema.write_text(json.dumps({"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}))
    target = ("--target", served.address, "--quiet", "--max-tokens", "64")
    chosen = pagecast("generate", "Is water wet? ", "--choice", "yes", "--choice", "no", *target)
    assert chosen.returncode == 0 and chosen.stdout.strip() in ("yes", "no")
    made = pagecast("generate", "A number in JSON: ", "--json-schema", f"@{schema}", "--temperature", "0", *target)
    assert made.returncode == 0 and isinstance(json.loads(made.stdout)["n"], int), made.stdout + made.stderr
    wrong = pagecast("generate", "x", "--regex", "(", *target)
    assert wrong.returncode == 1 and "spec.constraint.regex" in wrong.stderr
    missing = pagecast("generate", "x", "--json-schema", "@/nowhere.json", *target)
    assert missing.returncode == 2 and "cannot read /nowhere.json" in missing.stderr
