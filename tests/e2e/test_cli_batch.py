"""`pagecast batch`: a file of requests is answered whole, and what was answered before a crash is not asked again."""

import asyncio
import json
import math
import os
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


def test_the_longest_outputs_are_asked_first(tmp_path: Path) -> None:
    """More lines than are under way at a time: what comes last in the file must not begin when all else has ended."""
    source = tmp_path / "in.jsonl"
    limits: dict[str, dict[str, Any]] = {
        "ten": {"max_tokens": 10}, "default": {}, "thirty": {"max_tokens": 30}, "none": {"max_tokens": 30, "priority": "normal"},
        "also ten": {"max_tokens": 10}, "twenty": {"max_tokens": 20},
    }  # fmt: skip
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "ignore_eos": True} | limit}
        for name, limit in limits.items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = pagecast("batch", str(source), "--executor", "oracle", "--concurrency", "1")
    assert done.returncode == 0, done.stderr
    answers = read(tmp_path / "in.output.jsonl")
    assert list(answers) == ["none", "thirty", "twenty", "default", "ten", "also ten"]
    assert [answer["body"]["usage"]["completion_tokens"] for answer in answers.values()] == [30, 30, 20, 16, 10, 10]


@pytest.mark.parametrize(
    ("url", "body", "most"),
    [
        ("/v1/chat/completions", {}, math.inf),
        ("/v1/chat/completions", {"max_completion_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": 9}, 9),
        ("/v1/chat/completions", {"max_tokens": None}, math.inf),
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": None}, math.inf),
        ("/v1/completions", {"max_tokens": "many"}, math.inf),  # the server says what is wrong with it
        ("/v1/completions", {"max_tokens": 3, "priority": "batch"}, 3),
        ("/v1/completions", {"max_tokens": 3, "priority": ["batch"]}, math.inf),
    ],
)
def test_how_much_output_a_line_may_have(url: str, body: dict[str, Any], most: float) -> None:
    assert batch.Task("a", url, body).most_output == most


def test_a_file_without_a_request_is_refused_by_its_first_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for content, complaint in (
        (b"{}\n", "line 1: custom_id must be a text; body must be an object; url must be one of /v1/chat/completions, /v1/completions"),
        (b'\n{"custom_id": "a", "url": "/v1/embeddings", "body": {}}\n', "line 2: url must be one of /v1/chat"),
        (b"x\n[]\n", "line 1: not JSON: Expecting value"),
        (b"\n\n", "in.jsonl has no request\n"),
    ):
        source.write_bytes(content)
        refused = pagecast("batch", str(source), "--executor", "oracle")
        assert refused.returncode == 2 and complaint in refused.stderr and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert not (tmp_path / "in.output.jsonl").exists()
    missing = pagecast("batch", str(tmp_path / "nothing.jsonl"))
    assert missing.returncode == 2 and missing.stderr.endswith("nothing.jsonl: No such file or directory\n")


GOOD = {"method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}}
BAD: list[tuple[bytes, str | None, str, str | None, str]] = [
    (b"{", None, "invalid_json_line", None, "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    (b'"\xff"', None, "invalid_json_line", None, "not UTF-8 text"),
    (b"[]", None, "invalid_json_line", None, "not a JSON object"),
    (json.dumps(GOOD).encode(), None, "missing_required_parameter", "custom_id", "custom_id must be a text"),
    (json.dumps(GOOD | {"custom_id": 7}).encode(), None, "invalid_value", "custom_id", "custom_id must be a text"),
    (json.dumps(GOOD | {"custom_id": "u", "url": "/v1/embeddings"}).encode(), "u", "invalid_value", "url",
     "url must be one of /v1/chat/completions, /v1/completions"),
    (json.dumps(GOOD | {"custom_id": "m", "method": "GET", "body": 3}).encode(), "m", "invalid_value", "body",
     "body must be an object; method must be POST"),
    (json.dumps(GOOD | {"custom_id": "s", "body": {"prompt": "x", "stream": True}}).encode(), "s", "invalid_value", "body.stream",
     "body.stream makes no sense in a batch"),
    (json.dumps(GOOD | {"custom_id": "a"}).encode(), "a", "duplicate_custom_id", "custom_id", "custom_id 'a' is that of line 1 too"),
]  # fmt: skip


def test_bad_lines_have_errors_in_the_output_and_the_others_are_answered(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.output.jsonl"
    good = [json.dumps(GOOD | {"custom_id": name}).encode() for name in "ab"]
    source.write_bytes(b"\n".join([good[0], *(line for line, *_ in BAD), b"", good[1]]))
    done = pagecast("batch", str(source), "--executor", "oracle")
    assert done.returncode == 1 and "11 requests, 0 answered before, 2 now, 9 failed" in done.stdout, done.stdout + done.stderr
    assert f"{source}, line 2: not JSON" in done.stderr and "1 more lines cannot be asked" in done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    errors = [line for line in lines if line["response"] is None]
    for number, ((_, custom_id, code, param, message), found) in enumerate(zip(BAD, errors, strict=True), 2):
        assert found["custom_id"] == custom_id and found["id"].startswith("batch_req_")
        assert found["error"] == {"code": code, "message": f"line {number}: {message}", "param": param, "line": number}
    answers = {line["custom_id"]: line for line in lines if line["error"] is None}
    assert answers.keys() == {"a", "b"} and all(answer["response"]["status_code"] == 200 for answer in answers.values())

    output.chmod(0o640)
    source.write_bytes(b"\n".join([*good, b"{", json.dumps(GOOD | {"custom_id": "u"}).encode()]))  # most is mended
    again = pagecast("batch", str(source), "--executor", "oracle")
    assert again.returncode == 1 and "4 requests, 2 answered before, 1 now, 1 failed" in again.stdout, again.stdout + again.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [*answers, None, "u"] and lines[2]["error"]["line"] == 3
    assert lines[:2] == list(answers.values()) and output.stat().st_mode & 0o777 == 0o640


def test_one_line_cannot_end_a_batch_nor_be_cut_in_two(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "in.output.jsonl"
    prompts = {"a": "x\u2028y\u0085z", "\ud83d": "fine", "b": "half of a pair: \ud83d", "c": "the last"}
    lines = []
    for name, prompt in prompts.items():
        line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}}
        lines.append(json.dumps(line, ensure_ascii="\ud83d" in name + prompt))  # the first with its characters as they are
    lines.append(lines[-1].replace('"c"', '"d"').replace('"max_tokens": 2', '"temperature": NaN'))
    source.write_text("\n".join(lines), "utf-8-sig")  # as some editors begin a file
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


def test_a_disk_that_is_full_ends_the_batch_and_says_so() -> None:
    server = FakeServer()
    tasks = [batch.Task(name, "/v1/completions", {"prompt": "hello"}) for name in "ab"]
    try:
        with batch.opened(Path("/dev/full")) as sink, pytest.raises(batch.Unwritable, match=r"write /dev/full: No space left.*same again"):
            asyncio.run(batch.answer_all(tasks, batch.Server(server.target, None, None), sink, 2, 2))
    finally:
        server.close()


def test_an_output_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "notes"
    write(source, 1)
    for content in ("notes", "notes\n", '{"custom_id": "r0"}\n'):
        output.write_text(content)
        refused = pagecast("batch", str(source), "--output", str(output), "--executor", "oracle")
        assert refused.returncode == 2 and "not an answer of a batch" in refused.stderr and output.read_text() == content
    os.mkfifo(pipe := tmp_path / "pipe")
    endless = pagecast("batch", str(source), "--output", str(pipe), "--executor", "oracle")
    assert endless.returncode == 2 and "must be an ordinary file" in endless.stderr and len(endless.stderr.splitlines()) == 1
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
