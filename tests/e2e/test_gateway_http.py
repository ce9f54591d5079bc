"""The HTTP gateway as a program of its own: its page, health, limits, disconnects, and its life beside the other processes."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.cli_server import LIMIT_S, PAGECAST, Served, pagecast, serve
from frontend.secure_rig import Authority, write
from waiting import until

from pagecast import Client

ORACLE = ("--executor", "oracle", "--http-port", "0")
LONG = {"prompt": [1, 2, 3], "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    words = ("--oracle-step-us", "2000", "--max-model-len", "200000", "--num-blocks", "20000", "--num-frontends", "2")
    with serve(*ORACLE, *words) as cluster:
        yield cluster


def running(served: Served) -> int:
    with Client(served.address) as client:
        return client.load().num_running


def test_the_page_and_its_files_are_served(served: Served) -> None:
    with httpx.Client(base_url=served.http, timeout=LIMIT_S) as http:
        page = http.get("/")
        assert page.status_code == 200 and "Pagecast" in page.text and "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("chat.js", "chat.css"):
            assert f"/page/{name}" in page.text and http.get(f"/page/{name}").status_code == 200
        assert http.get("/page/../app.py").status_code == 404
        until(lambda: http.get("/health").json() == {"status": "SERVING"}, "the gateway's front ends do not answer in its time")
        assert http.get("/load").json()["state"] == "serving"


def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    with httpx.Client(base_url=served.http, timeout=LIMIT_S) as http:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
            for _ in reply.iter_lines():  # reads on meanwhile: a stream that nobody reads is paused and does not run
                if running(served) == 1:
                    break
        until(lambda: running(served) == 0, "a stream went on without its reader")

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=served.http, timeout=LIMIT_S) as http:
            task = asyncio.create_task(http.post("/v1/completions", json=LONG))
            while await asyncio.to_thread(running, served) == 0:
                await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), LIMIT_S))
    until(lambda: running(served) == 0, "a whole answer went on without anybody waiting for it")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b'{"messages": 3, "prompt": {}, "tokens": 4}', b"\xff", b"{" * 999])
def test_what_is_no_request_is_refused_with_a_body(served: Served, path: str, content: bytes) -> None:
    reply = httpx.post(served.http + path, content=content, headers={"content-type": "application/json"}, timeout=LIMIT_S)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert "Traceback" not in reply.text and "pagecast_scheduler" not in reply.text


@pytest.mark.parametrize(("path", "content", "param", "said"), [
    ("chat/completions", {"messages": [{"content": "x"}], "n": -1, "temperature": "hot", "colour": "red", "stop": 3}, "n", [
        "n: Input should be greater than or equal to 0", "temperature: Input should be a valid number", "messages[0].role: Field required",
        "colour: unknown field", "stop: Input should be a valid string or a valid list",
    ]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "audio"}]}], "logit_bias": {"x": 1.0, "9" * 5000: 1.0},
        "top_logprobs": 2, "response_format": {"type": "json_schema"},
    }, "logit_bias", [
        "messages[0].content[0]: image_url is not supported", "messages[0].content[1]: audio is not supported",
        "the keys of logit_bias must be token ids", "top_logprobs needs logprobs to be true", "response_format.json_schema must be given",
    ]),
    ("chat/completions", {"messages": [], "logit_bias": {"x": 1.0}}, "logit_bias", ["messages must hold at least one message"]),
    ("../tokenizer", {}, None, ["there is no POST /tokenizer here; /openapi.json has what there is"]),
    ("../completions", {}, None, ["there is no POST /completions here, but /v1/completions: a base URL ends in /v1"]),
    ("embeddings", {}, None, ["there is no POST /v1/embeddings here; /openapi.json has what there is"]),
    ("completions", {"prompt": [], "best_of": 3}, "best_of", ["best_of must equal n", "prompt must hold 1 to 128 prompts, not 0"]),
    ("completions", {"prompt": "x", "temperature": 1000, "top_p": 2, "max_tokens": 0, "n": 0}, "temperature", [
        "temperature must be 0 to 100, not 1000", "top_p must be greater than 0 and at most 1, not 2", "max_tokens must be 1 to",
        "n must be 1 to",
    ]),
    ("completions", {
        "prompt": ["x", ""], "colour": 1, "temperature": 1000, "top_p": 2, "max_tokens": "many", "n": 0, "best_of": 7,
    }, "max_tokens", [
        "max_tokens: Input should be a valid integer", "colour: unknown field", "temperature must be 0 to 100, not 1000",
        "top_p must be greater than 0 and at most 1, not 2", "n must be 1 to", "best_of must equal n", "prompt[1] must not be empty",
    ]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x", "mood": 1}, {"content": 3}, {"role": "", "content": "x"}], "temperature": -1,
        "logprobs": "yes", "top_logprobs": 999, "max_completion_tokens": 0, "tool_choice": {"type": "function", "function": {"name": "f"}},
    }, "messages[0].mood", [
        "logprobs: Input should be a valid boolean", "messages[0].mood: unknown field", "messages[1].role: Field required",
        "messages[1].content: Input should be a valid string", "messages[2].role must be 1 to", "temperature must be 0 to 100, not -1",
        "top_logprobs must be 0 to", "max_completion_tokens must be 1 to", "tool_choice REQUIRED needs tools",
    ]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x"}], "tools": "t", "tool_choice": "required", "response_format": {"type": "json_schema"},
        "min_p": 3, "model": "another",
    }, "tools", ["tools: Input should be a valid list", "response_format.json_schema must be given"]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"role": "x"}]}], "top_p": 2,
    }, "messages[1].tool_calls[0].id", ["tool_calls[0].id: Field required", "tool_calls[0].role: unknown field", "top_p must be"]),
    ("completions", {"prompt": "x", "model": "another", "colour": 1}, "colour", ["colour: unknown field", "model"]),
    ("chat/completions", {"messages": [], "top_p": 2}, "messages", ["messages must hold at least one", "top_p must be greater than 0"]),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 999}, "top_logprobs", [
        "top_logprobs must be 0 to",
    ]),
    ("completions", {
        "prompt": "x", "logit_bias": {"5": 1, "05": 2, "4000000000": 1000}, "allowed_token_ids": [1, 1], "cache_scope": "x" * 200,
    }, "logit_bias.4000000000", [
        "logit_bias.4000000000 must be 0 to", "logit_bias.4000000000 must be -100 to 100", "logit_bias.05 must be given once, 5 is",
        "allowed_token_ids[1] must be given once", "cache_scope must be at most",
    ]),
    ("completions", {"prompt": ["x", "y"], "logit_bias": {"05": 1, "5": 2}, "colour": 1}, "colour", [
        "logit_bias.5 must be given once, 5 is repeated",
    ]),
    ("completions", {"prompt": ["x", "y"], "logit_bias": {"05": 1, "5": 2}}, "logit_bias.5", ["logit_bias.5 must be given once"]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{"}}, {"id": "2", "function": {"name": "", "arguments": "{}"}},
        ]}], "tools": [{"type": "function", "function": {"name": ""}}], "tool_choice": {"type": "function", "function": {"name": "g"}},
    }, "messages[1].tool_calls[0].function.arguments", [
        "messages[1].tool_calls[1].function.name must", "tools[0].function.name must be 1 to", "tool_choice.function.name must be the name",
    ]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?=a)"}}},
    }, "response_format.json_schema.schema", ["response_format.json_schema.schema: regex parse error"]),
    ("chat/completions", {
        "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": {"schema": False}},
    }, "response_format.json_schema.schema", ["response_format.json_schema.schema: Unsatisfiable"]),
    ("completions", {"prompt": "x", **{f"x{i}": i for i in range(99)}}, "x0", ["x0: unknown field", "x31: unknown field", "; 67 more"]),
])  # fmt: skip
def test_one_error_names_all_that_is_wrong(served: Served, path: str, content: dict[str, Any], param: str | None, said: list[str]) -> None:
    reply = httpx.post(f"{served.http}/v1/{path}", json={"model": "oracle", **content}, timeout=LIMIT_S)
    error = reply.json()["error"]
    is_missing = path == "embeddings" or path.startswith("..")
    assert (reply.status_code, error["type"]) == (404 if is_missing else 400, "invalid_request_error")
    for words in said:
        assert words in error["message"], error["message"]
    assert error["param"] == param and len(error["message"]) < 2000


@pytest.mark.parametrize(("path", "content", "said"), [
    ("completions", {"prompt": "\ud83d", "stop": ["x", "\udc00"], "temperature": -1}, [
        "stop[1]: must not hold half of a surrogate pair; prompt: must not hold half of a surrogate pair; temperature must be 0",
    ]),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud83d"}], "top_p": 2}, ["messages[0].content: must not", "top_p"]),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, ["content[0] must have"]),
    ("chat/completions", {"chat_template_kwargs": {"x": ["\ud83d"]}}, ["chat_template_kwargs must not hold half"]),
    ("chat/completions", {"chat_template_kwargs": {"x": float("nan")}}, ["chat_template_kwargs.x must hold finite numbers"]),
    ("chat/completions", {"chat_template_kwargs": json.loads('{"x":' * 90 + "1" + "}" * 90)}, ["nested at most 24 deep"]),
    ("completions", {"prompt": "x", "\ud83d": 1}, ["a field's name must not hold half"]),
    ("../tokenize", {"prompt": "\ud83d"}, ["prompt: must not hold half"]),
])  # fmt: skip
def test_what_the_api_cannot_carry_is_named(served: Served, path: str, content: dict[str, Any], said: list[str]) -> None:
    """JSON can write halves of surrogate pairs, as of a text that was cut within an emoji, and Python's reads NaN."""
    body = json.dumps({"model": "oracle", **({"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}), **content})
    reply = httpx.post(f"{served.http}/v1/{path}", content=body, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)
    assert reply.status_code == 400, reply.text
    for words in said:
        assert words in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("content", [
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff"}',
])  # fmt: skip
def test_a_body_that_no_parser_reads_says_why(served: Served, content: bytes) -> None:
    reply = httpx.post(f"{served.http}/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)
    assert reply.status_code == 400 and "the body cannot be read: it is not UTF-8, is nested too deep" in reply.json()["error"]["message"]


def test_the_deepest_values_of_a_template_arrive(served: Served) -> None:
    content = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": json.loads('{"x":' * 24 + "1" + "}" * 24), "n": 0}
    reply = httpx.post(f"{served.http}/v1/chat/completions", json=content, timeout=LIMIT_S)
    assert reply.json()["error"]["param"] == "n", reply.text


def test_other_bodies_are_told_all_faults_too(served: Served) -> None:
    for path, content, said in (
        ("tokenize", {"colour": 1, "messages": [{"role": " ", "content": "x"}]}, ["colour: unknown field", "messages[0].role must be"]),
        ("tokenize", {"prompt": "x", "messages": [{"role": "", "content": "x"}]}, ["either prompt or messages", "[0].role must be"]),
        ("detokenize", {"colour": 1, "tokens": [1, 1 << 31]}, ["colour: unknown field", "tokens[1] must be below the vocabulary size"]),
    ):
        reply = httpx.post(f"{served.http}/{path}", json=content, timeout=LIMIT_S)
        assert reply.status_code == 400
        for words in said:
            assert words in reply.json()["error"]["message"], reply.text


def test_what_is_refused_for_one_fault_is_run_for_none(served: Served) -> None:
    """A body with a fault is shown to front ends, which may find others: they must refuse it even where they find none."""
    bodies = [{"prompt": ["x"] * 9, "colour": 1}, {"prompt": "x", "best_of": 2}, {"prompt": "x", "max_tokens": "2"}]
    for body in bodies:
        headers = {"x-request-id": "shown-only"}
        reply = httpx.post(f"{served.http}/v1/completions", json={"model": "oracle", **body}, headers=headers, timeout=LIMIT_S)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] in ("colour", "best_of", "max_tokens") and ";" not in error["message"]

    def calls() -> list[str]:
        return [line for line in [*served.lines] if "shown-only" in line and "GenerationService" in line]

    until(lambda: len(calls()) == 11, "not every prompt was shown to a front end")
    assert all("INVALID_ARGUMENT" in line for line in calls())


def test_prompts_beside_a_wrong_one_do_not_go_on(served: Served) -> None:
    for stream in (False, True):
        reply = httpx.post(f"{served.http}/v1/completions", json=LONG | {"prompt": [[1], [1] * 200_000], "stream": stream}, timeout=LIMIT_S)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt[1]"
        until(lambda: running(served) == 0, "the other prompt goes on without anybody waiting for it")


def test_a_body_sent_as_a_form_and_none_are_told_how_to_be_sent(served: Served) -> None:
    kinds = {"content-type": "application/x-www-form-urlencoded"}  # curl's own
    reply = httpx.post(f"{served.http}/v1/completions", content=b'{"prompt": "x"}', headers=kinds, timeout=LIMIT_S)
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "the body must be a JSON object, sent as application/json"
    reply = httpx.post(f"{served.http}/v1/completions", headers={"content-type": "application/json"}, timeout=LIMIT_S)
    told = "the body is empty: it must be a JSON object, sent as application/json"
    assert reply.status_code == 400 and reply.json()["error"]["message"] == told


@pytest.mark.parametrize("seconds", [1.8e299, 1e12, 1e-12])
def test_a_budget_out_of_range_is_refused_by_name_or_kept(served: Served, seconds: float) -> None:
    body = {"model": "oracle", "prompt": "x", "max_tokens": 2, "time_budget_s": seconds}
    reply = httpx.post(f"{served.http}/v1/completions", json=body, timeout=LIMIT_S)
    assert reply.status_code == 200 or "time_budget" in reply.json()["error"]["param"], reply.text


def test_a_body_above_the_limit_is_refused(served: Served) -> None:
    big = json.dumps({"prompt": "x" * (8 << 20)}).encode()
    parts = [big[i : i + 65536] for i in range(0, len(big), 65536)]
    for make in (lambda: big, lambda: iter(parts)):
        end = time.monotonic() + LIMIT_S
        while (code := answer_to(served, make())) is None:
            assert time.monotonic() < end, "its answer never arrives"
        assert code == 413


def answer_to(served: Served, content: bytes | Iterator[bytes]) -> int | None:
    """None where the gateway has closed while the rest was still being sent: its answer may then be lost on the way."""
    try:
        return httpx.post(served.http + "/v1/completions", content=content, timeout=LIMIT_S).status_code
    except (httpx.WriteError, httpx.ReadError):
        return None


def test_a_dead_gateway_and_a_dead_front_end_come_back(served: Served) -> None:
    def answers() -> bool:
        try:
            reply = httpx.post(served.http + "/v1/completions", json={"prompt": [1], "max_tokens": 2}, timeout=LIMIT_S)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    served.children()["gateway"][0].send_signal(signal.SIGKILL)
    until(answers, "no gateway came back")
    served.children()["frontend"][0].send_signal(signal.SIGKILL)
    assert all(answers() for _ in range(4))  # the other front end answers meanwhile
    until(lambda: len(served.children()["frontend"]) == 2, "no front end came back")


@contextmanager
def own_gateway(served: Served, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway that is no process of the cluster, and its address. What it logs after that is left to be read from stderr."""
    command = [*PAGECAST, "gateway", "--target", served.address, "--http-port", "0", "--log-format", "json", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stderr is not None
            yield gateway, next(json.loads(line)["address"] for line in gateway.stderr if '"address"' in line)
        finally:
            gateway.kill()


def test_a_gateway_of_its_own_reaches_any_cluster(served: Served) -> None:
    with own_gateway(served, "--drain-announce-s", "0") as (gateway, address):
        asked = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
        reply: Any = httpx.post(address + "/v1/completions", json=asked, timeout=LIMIT_S).json()
        assert reply["usage"]["completion_tokens"] == 3
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(LIMIT_S) == 0


def test_an_idle_gateway_announces_its_end_and_answers_meanwhile(served: Served) -> None:
    with own_gateway(served, "--drain-announce-s", "3600") as (gateway, address):
        until(lambda: httpx.get(address + "/health", timeout=LIMIT_S).status_code == 200, "it is never healthy")
        gateway.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(address + "/health", timeout=LIMIT_S).status_code == 503, "balancers are not told")
        reply = httpx.post(address + "/v1/completions", json={"prompt": [5], "max_tokens": 3}, timeout=LIMIT_S)
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        gateway.send_signal(signal.SIGTERM)  # a second one, which waits for nobody
        assert gateway.wait(LIMIT_S) == 0


def test_the_gateway_of_a_cluster_answers_while_its_front_ends_announce_their_end() -> None:
    with serve(*ORACLE, "--drain-announce-s", "3600") as cluster, httpx.Client(base_url=cluster.http, timeout=LIMIT_S) as http:
        until(lambda: http.get("/health").status_code == 200, "it is never healthy")
        cluster.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/health").status_code == 503, "balancers are not told")
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3}).status_code == 200
        assert cluster.end() == 0


@pytest.mark.parametrize(("words", "warned"), [
    (["--target", "unix:/nowhere/a.sock,127.0.0.1:1,[::1]:1,localhost:1"], None), (["--target", "192.0.2.1:1", "--target-tls"], None),
    (["--target", "127.0.0.1:1,192.0.2.1:1,llm.example.org:1"], ["192.0.2.1:1", "llm.example.org:1"]),
])  # fmt: skip
def test_a_gateway_warns_once_of_tokens_in_plaintext(words: list[str], warned: list[str] | None) -> None:
    command = [*PAGECAST, "gateway", "--http-port", "0", "--log-format", "json", "--drain-announce-s", "0", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        lines = []
        for line in (line for line in gateway.stderr if line.startswith("{")):
            lines.append(json.loads(line))
            if "address" in lines[-1]:
                gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(LIMIT_S) == 0  # a signal ends it in order from the moment it says where it listens
    told = [line for line in lines if line["level"] == "warning"]
    assert [line["targets"] for line in told] == ([] if warned is None else [warned])
    assert all("--target-tls" in line["event"] and "plaintext" in line["event"] for line in told) and lines[-1]["event"] == "stopped"


def test_health_needs_no_token_where_everything_else_does(tmp_path: Path) -> None:
    auth = str(tmp_path / "auth.toml")
    header = {"Authorization": f"Bearer {pagecast('token', 'alice', '--file', auth).stdout.split()[-1]}"}
    with serve(*ORACLE, "--auth-file", auth) as cluster, httpx.Client(base_url=cluster.http, timeout=LIMIT_S) as http:
        until(lambda: http.get("/health").status_code == 200, "its health cannot be seen")
        assert http.get("/v1/models").status_code == 401 and http.get("/v1/models", headers=header).status_code == 200
        assert http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 401


def test_a_gateway_takes_over_a_new_certificate_and_no_bad_one(tmp_path: Path, served: Served) -> None:
    authority = Authority.make(tmp_path)
    cert, key = authority.issue("own", "localhost")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))

    def shown(port: int) -> str:
        encrypted = partial(trusted.wrap_socket, server_hostname="localhost")
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain, encrypted(plain) as connection:
            return str(connection.getpeercert()["serialNumber"])

    lines: list[str] = []
    with own_gateway(served, "--tls-cert", cert, "--tls-key", key) as (gateway, address):
        port = int(address.rpartition(":")[2])
        reader = threading.Thread(target=lambda: lines.extend(gateway.stderr or ()), daemon=True)
        reader.start()
        try:
            first = shown(port)
            write(Path(cert), b"half of a certific")
            until(lambda: shown(port) == first and any("not taken over" in line for line in lines), "a bad certificate is not told")
            assert shown(port) == first
            authority.issue("own", "localhost")
            until(lambda: shown(port) != first, "a new certificate is not taken over")
            with httpx.Client(verify=trusted, timeout=LIMIT_S) as http:
                assert http.get(f"https://localhost:{port}/version").status_code == 200
            asked = ("status", "--url", f"https://localhost:{port}", "--ca", str(tmp_path / "ca.pem"))
            until(lambda: pagecast(*asked).stdout == "SERVING\n", "`pagecast status` does not see its health")
            assert pagecast(*asked[:-2]).stdout == "NOT_SERVING\n"  # by an authority that nobody knows
        finally:
            gateway.kill()
            reader.join(LIMIT_S)


def test_a_gateway_that_cannot_work_says_why(tmp_path: Path) -> None:
    cert, key = Authority.make(tmp_path).issue("own", "localhost")
    open_key = write(tmp_path / "open.key", Path(key).read_bytes(), mode=0o644)
    for files, said in (
        ((cert, "/nowhere.key"), "cannot read /nowhere.key"), ((cert, cert), "are not a certificate and its key in PEM"),
        ((cert, Authority.make(tmp_path).issue("other", "localhost")[1]), "do not belong together"),
        ((cert, open_key), "may be read by everyone"),
    ):  # fmt: skip
        bad = pagecast("gateway", "--http-port", "0", "--tls-cert", files[0], "--tls-key", files[1])
        assert bad.returncode == 2 and said in bad.stderr and len(bad.stderr.splitlines()) == 1
    away = pagecast("gateway", "--host", "0.0.0.0")
    assert away.returncode == 2 and "plain HTTP" in away.stderr and "--insecure" in away.stderr
    wrong = pagecast("gateway", "--http-port", "70000")
    assert wrong.returncode == 2 and "--http-port must be 0 to 65535" in wrong.stderr
