"""`pagecast batch`: a file of requests is answered whole, and what was answered before a crash is not asked again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from client.fake_server import FakeServer
from e2e.cli_server import pagecast, serve
from frontend.secure_rig import Authority

from pagecast.cli import batch


def write(path: Path, count: int) -> None:
    lines = []
    for i in range(count):
        body: dict[str, Any] = {"prompt": [i + 1, 2, 3], "max_tokens": 4 + i % 3, "ignore_eos": True, "seed": i, "temperature": 1.0}
        if i == 2:
            body["temperature"] = -1
        lines.append({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}


def test_a_batch_is_answered_and_taken_up_again_where_it_broke(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.output.jsonl"
    write(source, 20)
    first = pagecast("batch", str(source), "--executor", "oracle", "--concurrency", "4")
    assert first.returncode == 1 and "20 requests, 0 answered before, 20 now, 1 failed" in first.stdout, first.stderr
    answers = read(output)
    assert len(answers) == 20 and answers["r2"]["status_code"] == 400 and answers["r2"]["body"]["error"]["param"] == "temperature"
    for i in (0, 1, *range(3, 20)):
        assert answers[f"r{i}"]["body"]["usage"]["completion_tokens"] == 4 + i % 3

    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:7]) + lines[7][:30])  # as if the machine had gone down in the middle of a line
    again = pagecast("batch", str(source), "--executor", "oracle")
    assert "20 requests, 7 answered before, 13 now, 1 failed" in again.stdout, again.stderr
    repeated = read(output)
    for key, value in repeated.items():
        assert value["body"].get("choices") == answers[key]["body"].get("choices")


def test_a_file_that_is_no_batch_is_refused_by_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for content, complaint in (
        ("{}\n", "line 1: needs custom_id"),
        ('\n{"custom_id": "a", "url": "/v1/embeddings", "body": {}}\n', "line 2: method must be POST and url one of"),
        ("x\n", "line 1: not JSON"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "line 2: custom_id 'a' is there twice"),
    ):
        source.write_text(content)
        refused = pagecast("batch", str(source), "--executor", "oracle")
        assert refused.returncode == 2 and complaint in refused.stderr, refused.stderr
    missing = pagecast("batch", str(tmp_path / "nothing.jsonl"))
    assert missing.returncode == 2 and missing.stderr.endswith("nothing.jsonl: No such file or directory\n")


def test_one_line_cannot_end_a_batch_nor_be_cut_in_two(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.output.jsonl"
    prompts = {"a": "x\u2028y\u0085z", "\ud83d": "fine", "b": "half of a pair: \ud83d", "c": "the last"}
    lines = []
    for name, prompt in prompts.items():
        line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}}
        lines.append(json.dumps(line, ensure_ascii="\ud83d" in name + prompt))  # the first with its characters as they are
    lines.append(lines[-1].replace('"c"', '"d"').replace('"max_tokens": 2', '"temperature": NaN'))
    source.write_text("\n".join(lines), "utf-8")
    done = pagecast("batch", str(source), "--executor", "oracle")
    assert done.returncode == 1 and "5 requests, 0 answered before, 5 now, 2 failed" in done.stdout, done.stdout + done.stderr
    answers = read(output)
    assert {name: answer["status_code"] for name, answer in answers.items()} == {"a": 200, "\ud83d": 200, "b": 400, "c": 200, "d": 400}
    assert answers["b"]["body"]["error"] == {
        "message": "prompt: must not hold half of a surrogate pair", "type": "invalid_request_error", "param": "prompt", "code": None,
    }  # fmt: skip


def test_a_server_that_is_away_ends_the_batch_and_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that a server never answered are asked when the batch is taken up; only those that have an answer are written."""
    monkeypatch.setattr(batch, "PATIENCE_S", 1.5)
    server, output = FakeServer(), tmp_path / "out"
    tasks = [batch.Task(name, "/v1/completions", {"prompt": prompt}) for name, prompt in (("a", "hello"), ("b", "busy"), ("c", "busy"))]
    try:
        with output.open("w") as sink, pytest.raises(batch.ServerAway, match="the queue is full; run the same again"):
            asyncio.run(batch.answer_all(tasks, batch.Server(server.target, None, None), sink, 3, 3))
    finally:
        server.close()
    assert {name: answer["status_code"] for name, answer in read(output).items()} == {"a": 200}


def test_an_output_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "notes"
    write(source, 1)
    for content in ("notes", "notes\n", '{"custom_id": "r0"}\n'):
        output.write_text(content)
        refused = pagecast("batch", str(source), "--output", str(output), "--executor", "oracle")
        assert refused.returncode == 2 and "not an answer of a batch" in refused.stderr and output.read_text() == content
    nowhere = pagecast("batch", str(source), "--output", str(tmp_path / "no" / "file"), "--executor", "oracle")
    assert nowhere.returncode == 2 and nowhere.stderr.endswith("file: No such file or directory\n") and "cannot write" in nowhere.stderr


def test_a_batch_gets_into_a_server_with_tls_and_tokens(tmp_path: Path) -> None:
    authority, source, token = Authority.make(tmp_path), tmp_path / "in.jsonl", tmp_path / "token"
    cert, key = authority.issue("server", "127.0.0.1")
    write(source, 2)
    token.write_text(pagecast("token", "alice", "--file", str(tmp_path / "auth.toml")).stdout.split()[-1])
    with serve("--executor", "oracle", "--tls-cert", cert, "--tls-key", key, "--auth-file", str(tmp_path / "auth.toml")) as served:
        words = ("--target", served.address, "--ca", str(tmp_path / "ca.pem"))
        stranger = pagecast("batch", str(source), *words, "--output", str(tmp_path / "refused"))
        assert stranger.returncode == 1 and {answer["status_code"] for answer in read(tmp_path / "refused").values()} == {401}
        known = pagecast("batch", str(source), *words, "--token-file", str(token))
        assert known.returncode == 0 and len(read(tmp_path / "in.output.jsonl")) == 2, known.stdout + known.stderr
    alone = pagecast("batch", str(source), "--ca", str(tmp_path / "ca.pem"))
    assert alone.returncode == 2 and "go with --target" in alone.stderr
