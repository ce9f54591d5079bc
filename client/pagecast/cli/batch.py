"""`pagecast batch FILE.jsonl`: an OpenAI batch file, answered offline by a private cluster or by a running server, resumable.

Every line goes through the HTTP gateway's own application, without a socket: what it answers is what a server would.
"""

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
URLS = ("/v1/chat/completions", "/v1/completions")


class BadBatch(PagecastError):
    """A batch file that cannot be worked on."""

    exit_code = 2


class ServerAway(PagecastError):
    """Nobody has answered any line for PATIENCE_S."""


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and how to get in."""

    target: str
    tls: Tls | None
    token: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.jsonl", help="one request a line: custom_id, method POST, url, body")
    parser.add_argument("--output", metavar="OUT.jsonl", help="answers; lines that are there already are not asked again "
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
    tasks = read_tasks(source)
    output = Path(args.output) if args.output else source.with_suffix(".output.jsonl")
    if not tasks:
        raise BadBatch(f"{source} has no request")
    done = answered(output)
    left = [task for task in tasks if task.custom_id not in done]
    if left:
        with _opened(output) as sink, cluster_of(args, access) as target:
            asyncio.run(answer_all(left, Server(target, **access), sink, args.concurrency, len(tasks)))
    failed = sum(status != 200 for status in answered(output).values())
    print(f"{len(tasks)} requests, {len(done)} answered before, {len(left)} now, {failed} failed; written to {output}")
    return 1 if failed else 0


def read_tasks(source: Path) -> list[Task]:
    """Every line of the input. Raises BadBatch naming the first line that is no request, or that repeats an id."""
    tasks: list[Task] = []
    seen: set[str] = set()
    try:
        lines = source.read_text("utf-8").split("\n")  # splitlines also cuts at characters that JSON's texts may hold
    except (OSError, UnicodeDecodeError) as error:
        raise BadBatch(f"cannot read {source}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _task(line, f"{source}, line {number}")
        if task.custom_id in seen:
            raise BadBatch(f"{source}, line {number}: custom_id {task.custom_id!r} is there twice")
        seen.add(task.custom_id)
        tasks.append(task)
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadBatch(f"{where}: not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str) or not isinstance(given.get("body"), dict):
        raise BadBatch(f"{where}: needs custom_id, a text, and body, an object")
    if given.get("method", "POST") != "POST" or given.get("url") not in URLS:
        raise BadBatch(f"{where}: method must be POST and url one of {', '.join(URLS)}")
    if given["body"].get("stream"):
        raise BadBatch(f"{where}: body.stream makes no sense in a batch")
    return Task(given["custom_id"], given["url"], given["body"])


def answered(output: Path) -> dict[str, int]:
    """Status of every answer in the output so far. A last line that was cut off by a crash is taken away.

    Raises BadBatch for a file that holds anything else."""
    try:
        text = output.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadBatch(f"cannot read {output}: {error.strerror}") from None
    whole = text[: text.rfind(b"\n") + 1]
    found: dict[str, int] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            answer = json.loads(line)
            found[answer["custom_id"]] = answer["response"]["status_code"]
        except (ValueError, KeyError, TypeError):
            raise BadBatch(f"{output}, line {number}: not an answer of a batch; name another file with --output") from None
    if len(whole) != len(text):
        rest = text[len(whole) :]
        if not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
            raise BadBatch(f"{output}: its end is not an answer of a batch; name another file with --output")
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return found


def _opened(output: Path) -> IO[str]:
    try:
        return output.open("a", encoding="utf-8")
    except OSError as error:
        raise BadBatch(f"cannot write {output}: {error.strerror}") from None


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
    away: list[ServerAway] = []
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
                sink.write(_text(line) + "\n")
                sink.flush()
                bar.advance(row)

            try:
                async with asyncio.TaskGroup() as group:
                    for task in tasks:
                        await room.acquire()
                        group.create_task(one(task))
            except* ServerAway as found:
                away += [error for error in found.exceptions if isinstance(error, ServerAway)]
            finally:
                await backend.close()
    if away:
        raise away[0]


@dataclass(slots=True)
class Heard:
    """When any line was answered last, in monotonic seconds."""

    at: float


async def _answer(http: "httpx.AsyncClient", task: Task, heard: Heard) -> dict[str, Any]:
    """One line of the output. While the server is overloaded or away, it is asked again. Raises ServerAway."""
    begun = time.monotonic()
    body = json.dumps(task.body)  # as it was given: whether that is a good body is not to be said here
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
