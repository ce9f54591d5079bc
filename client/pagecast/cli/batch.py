"""`pagecast batch FILE.jsonl`: an OpenAI batch file, answered offline by a private cluster or by a running server, resumable.

Every line goes through the HTTP gateway's own application, without a socket: what it answers is what a server would.
"""

import argparse
import asyncio
import json
import math
import os
import secrets
import shutil
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pagecast import models
from pagecast.access import Tls
from pagecast.cli import arguments, options
from pagecast.cli.quantities import COUNT
from pagecast.errors import PagecastError
from pagecast.sync import Client

if TYPE_CHECKING:
    import httpx

_PASSED_ON = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "dtype", "executor", "gpu_memory_utilization",
    "cpu_kv_gib",
)
_BEGINNING = b'{"id": "batch_req_'
"""Of every line of an output."""
PATIENCE_S = 120.0
"""A server that is away or overloaded is asked again; after so long without an answer to any line the batch ends, to be taken up later."""
MOST_ATTEMPTS = 8
"""At a line whose answer the server could not bring to its end."""
_OF_THE_LINE = ("worker_lost", "queue_time_exceeded")
MOST_TOLD = 8
"""Bad lines of an input that are named on the terminal."""
URLS = ("/v1/chat/completions", "/v1/completions")


class BadBatch(PagecastError):
    """A batch file that cannot be worked on."""

    exit_code = 2


class ServerAway(PagecastError):
    """Nobody has answered any line for PATIENCE_S."""


class Unwritable(PagecastError):
    """An answer does not go into the output."""


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def most_output(self) -> float:
        """Tokens that its output may have; infinite where nothing limits it, and where it names a class of its own, which does not wait."""
        if self.body.get("priority", "batch") != "batch":
            return math.inf
        unless_given = 16 if self.url == "/v1/completions" else self.body.get("max_completion_tokens")
        limit = self.body.get("max_tokens", unless_given)
        return limit if isinstance(limit, int) else math.inf


Fault = tuple[str | None, str, str]
"""The field, OpenAI's word for what is wrong with it, and the same as a sentence."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the input that cannot be asked. custom_id: None where it has none."""

    number: int
    custom_id: str | None
    faults: list[Fault]

    @property
    def message(self) -> str:
        """What is wrong with it."""
        return "; ".join(text for _, _, text in self.faults)

    def answer(self) -> dict[str, Any]:
        """Its line of the output, as OpenAI writes those of requests that reached no endpoint."""
        param, code, _ = self.faults[0]
        error = {"code": code, "message": f"line {self.number}: {self.message}", "param": param, "line": self.number}
        return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": self.custom_id, "response": None, "error": error}


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and how to get in."""

    target: str
    tls: Tls | None
    token: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.jsonl", help="one request a line: custom_id, method POST, url, body")
    parser.add_argument("--output", metavar="OUT.jsonl", help="answers; lines that are answered there already are not asked again "
                        "(default: FILE.output.jsonl)")
    parser.add_argument("--model", default=models.DEFAULT_MODEL, metavar="MODEL", help="as for serve (default: %(default)s)")
    arguments.add_server(parser, None, "ask this running server instead of starting a cluster")
    parser.add_argument("--concurrency", type=COUNT, default=512, metavar="N", help="requests under way at a time (default: %(default)s)")
    options.add(parser, (option for option in options.of(options.SERVE) if option.name in _PASSED_ON))
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    access: dict[str, Any] = {"tls": None, "token": None}
    if args.target is not None:
        access = arguments.access(args)
    elif any((args.tls, args.ca, args.cert, args.key, args.server_name, args.token_file)):
        args.usage_error("--tls, --ca, --cert, --key, --server-name and --token-file go with --target")
    source = Path(args.file)
    tasks, bad = read_tasks(source)
    output = Path(args.output) if args.output else source.with_suffix(".output.jsonl")
    done = answered(output)
    left = [task for task in tasks if task.custom_id not in done]
    left.sort(key=lambda task: -task.most_output)  # of those under way the scheduler sees to it; no long one may be left over at the end
    with opened(output) as sink:
        _put(sink, [line.answer() for line in bad])
        _complain(source, bad)
        if left:
            with cluster_of(args, access) as target:
                asyncio.run(answer_all(left, Server(target, **access), sink, args.concurrency, len(tasks)))
    failed = sum(status != 200 for status in read_answers(output)[0].values()) + len(bad)
    print(f"{len(tasks) + len(bad)} requests, {len(done)} answered before, {len(left)} now, {failed} failed; written to {output}")
    return 1 if failed else 0


def _complain(source: Path, bad: list[BadLine]) -> None:
    """Of many bad lines the output has the rest."""
    for line in bad[:MOST_TOLD]:
        print(f"pagecast batch: {source}, line {line.number}: {line.message}", file=sys.stderr)
    if len(bad) > MOST_TOLD:
        print(f"pagecast batch: {source}: {len(bad) - MOST_TOLD} more lines cannot be asked", file=sys.stderr)


def read_tasks(source: Path) -> tuple[list[Task], list[BadLine]]:
    """Every request of the input, and what is wrong with the other lines: one of them spoils none of the rest. Raises BadBatch where no
    line can be asked."""
    tasks: list[Task] = []
    bad: list[BadLine] = []
    lines_of: dict[str, int] = {}
    try:
        lines = source.read_bytes().removeprefix(BOM_UTF8).split(b"\n")  # splitlines also cuts at characters that JSON's texts may hold
    except OSError as error:
        raise BadBatch(f"cannot read {source}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task, faults = _task(line)
        if task is not None and (first := lines_of.setdefault(task.custom_id, number)) != number:
            faults.append(("custom_id", "duplicate_custom_id", f"custom_id {task.custom_id!r} is that of line {first} too"))
        if faults or task is None:
            bad.append(BadLine(number, None if task is None else task.custom_id, faults))
        else:
            tasks.append(task)
    if not tasks:
        why = f": line {bad[0].number}: {bad[0].message}" if bad else ""
        raise BadBatch(f"{source} has no request{why}")
    return tasks, bad


def _task(line: bytes) -> tuple[Task | None, list[Fault]]:
    """The request of a line and what is wrong with it; None where not even its custom_id is known."""
    try:
        given = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, [(None, "invalid_json_line", "not UTF-8 text")]
    except (ValueError, RecursionError) as error:
        return None, [(None, "invalid_json_line", f"not JSON: {error}")]
    if not isinstance(given, dict):
        return None, [(None, "invalid_json_line", "not a JSON object")]
    faults: list[Fault] = []
    for name, kind, word in (("custom_id", str, "a text"), ("body", dict, "an object")):
        if not isinstance(given.get(name), kind):
            faults.append((name, "invalid_value" if name in given else "missing_required_parameter", f"{name} must be {word}"))
    if given.get("method", "POST") != "POST":
        faults.append(("method", "invalid_value", "method must be POST"))
    if given.get("url") not in URLS:
        faults.append(("url", "invalid_value" if "url" in given else "missing_required_parameter", f"url must be one of {', '.join(URLS)}"))
    custom_id, body = given.get("custom_id"), given.get("body")
    if isinstance(body, dict) and body.get("stream"):
        faults.append(("body.stream", "invalid_value", "body.stream makes no sense in a batch"))
    if not isinstance(custom_id, str):
        return None, faults
    return Task(custom_id, str(given.get("url")), body if isinstance(body, dict) else {}), faults


def answered(output: Path) -> dict[str, int]:
    """Status of every answer in the output so far. A last line that was cut off by a crash is taken away, and so are the complaints about
    lines of an input before, which may have been mended.

    Raises BadBatch for a file that holds anything else."""
    found, kept = read_answers(output)
    if kept is not None:
        target = Path(os.path.realpath(output))
        draft = target.with_name(f"{target.name}.new")
        try:
            draft.write_bytes(kept)
            shutil.copymode(target, draft)
            os.replace(draft, target)
        except OSError as error:
            raise BadBatch(f"cannot write {output}: {error.strerror}") from None
    return found


def read_answers(output: Path) -> tuple[dict[str, int], bytes | None]:
    """Status of every answer by custom_id, and what the file should hold instead, if it holds more. Raises as `answered` does,
    and for a pipe or a device, which gives nothing back, or for ever."""
    if output.exists() and not output.is_file() and not output.is_dir():
        raise BadBatch(f"cannot write {output}: a batch goes on from what is in its output, so that must be an ordinary file")
    try:
        text = output.read_bytes()
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        raise BadBatch(f"cannot read {output}: {error.strerror}") from None
    whole = text[: text.rfind(b"\n") + 1]
    rest = text[len(whole) :]
    found: dict[str, int] = {}
    kept: list[bytes] = []
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        try:
            answer = json.loads(line)
            if answer["response"] is None and "line" in answer["error"]:
                continue
            found[answer["custom_id"]] = answer["response"]["status_code"]
        except (ValueError, KeyError, TypeError):
            raise BadBatch(f"{output}, line {number}: not an answer of a batch; name another file with --output") from None
        kept.append(line)
    if not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
        raise BadBatch(f"{output}: its end is not an answer of a batch; name another file with --output")
    told = b"".join(kept)
    return found, None if told == text else told


@contextmanager
def opened(output: Path) -> Iterator[IO[str]]:
    """Where answers go, behind those that are there. Raises BadBatch."""
    try:
        sink = output.open("a", encoding="utf-8")
    except OSError as error:
        raise BadBatch(f"cannot write {output}: {error.strerror}") from None
    try:
        yield sink
    finally:
        with suppress(OSError):  # of what the last write could not write, which said so
            sink.close()


def _put(sink: IO[str], lines: list[dict[str, Any]]) -> None:
    """Raises Unwritable."""
    try:
        sink.writelines(_text(line) + "\n" for line in lines)
        sink.flush()
    except OSError as error:
        raise Unwritable(f"cannot write {sink.name}: {error.strerror}; run the same again to go on") from None


@contextmanager
def cluster_of(args: argparse.Namespace, access: dict[str, Any]) -> Iterator[str]:
    """The gRPC target to ask; a cluster of one's own ends with the block."""
    if args.target is not None:
        with Client(args.target, **access) as client:
            arguments.reach(client, None)  # a server that is lost later is waited for
        yield args.target
        return
    from pagecast import cluster
    from pagecast.cli.loading import LoadingBar
    from pagecast_scheduler.launch.events import Event, Loading

    bar = LoadingBar()

    def on_event(event: Event) -> None:
        if isinstance(event, Loading):
            bar.update(event.rank, event.phase, event.done, event.total)

    given = {name: getattr(args, name) for name in _PASSED_ON}
    private = {"max_queued_requests": 1_000_000, "max_queued_tokens": (1 << 31) - 1}
    try:
        running = cluster.PrivateCluster(cluster.settings(args.model, **given, **private), cluster.Watch(on_event))
    finally:
        bar.close()
    with running:
        yield running.target


async def answer_all(tasks: list[Task], server: Server, sink: IO[str], concurrency: int, total: int) -> None:
    """Asks everything, at most `concurrency` at a time, and writes each answer as soon as it is there."""
    import httpx
    from rich.console import Console
    from rich.progress import Progress

    from pagecast_scheduler.gateway.app import make_app
    from pagecast_scheduler.gateway.backend import Backend

    heard = Heard(time.monotonic())
    ended: list[BaseException] = []
    backend = Backend([server.target], server.tls)
    headers = {} if server.token is None else {"Authorization": f"Bearer {server.token}"}
    room = asyncio.Semaphore(concurrency)
    console = Console(stderr=True)
    app = make_app(backend, "batch")
    # An answer to a bug is an answer too: it belongs to one line, not to the batch.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    asks = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None, headers=headers)
    async with asks as http:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            row = bar.add_task("requests", total=total, completed=total - len(tasks))

            async def one(task: Task) -> None:
                try:
                    line = await _answer(http, task, heard)
                finally:
                    room.release()
                _put(sink, [line])
                bar.advance(row)

            try:
                async with asyncio.TaskGroup() as group:
                    for task in tasks:
                        await room.acquire()
                        group.create_task(one(task))
            except* (ServerAway, Unwritable) as found:
                ended += found.exceptions
            finally:
                await backend.close()
    if ended:
        raise ended[0]


@dataclass(slots=True)
class Heard:
    """When any line was answered last, in monotonic seconds."""

    at: float


async def _answer(http: "httpx.AsyncClient", task: Task, heard: Heard) -> dict[str, Any]:
    """One line of the output. While the server is overloaded or away, it is asked again. Raises ServerAway."""
    begun = time.monotonic()
    body = json.dumps({"priority": "batch"} | task.body)  # as it was given: whether that is a good body is not to be said here
    for attempt in count():
        reply = await http.post(task.url, content=body, headers={"Content-Type": "application/json"})
        if reply.status_code != 503:
            break
        error = reply.json()["error"]
        if error["code"] in _OF_THE_LINE and attempt + 1 >= MOST_ATTEMPTS:
            break
        wait = min(30.0, float(reply.headers.get("Retry-After", 1)) * 2 ** min(attempt, 5))
        if time.monotonic() + wait - max(begun, heard.at) > PATIENCE_S:
            raise ServerAway(f"no line was answered for {PATIENCE_S:g} s: {error['message']}; run the same again to go on")
        await asyncio.sleep(wait)
    heard.at = time.monotonic()
    response = {"status_code": reply.status_code, "request_id": secrets.token_hex(12), "body": reply.json()}
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": task.custom_id, "response": response, "error": None}


def _text(line: dict[str, Any]) -> str:
    """JSON with its characters as they are, unless one of them, of the input's custom_id, has no encoding."""
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(line)
    return text
