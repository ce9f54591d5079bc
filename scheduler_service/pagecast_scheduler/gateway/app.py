"""The HTTP application: OpenAI's endpoints over the gRPC API, and the page to chat with.

Every generating call is a gRPC call with the caller's own credentials: admission, limits, quotas and errors are the front end's.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from pagecast.errors import RpcError
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import runtime_pb2
from pagecast_scheduler.gateway import answers, chunks, schema, translate
from pagecast_scheduler.gateway.backend import Backend, Metadata
from pagecast_scheduler.gateway.errors import BadBody, Faults, body, faults_of, of_rpc
from pagecast_scheduler.gateway.merge import merged
from pagecast_scheduler.gateway.prompts import Prompts
from pagecast_scheduler.gateway.remainder import remainder

log = structlog.get_logger("pagecast.gateway")

T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
_FORWARDED = ("authorization", "traceparent", "tracestate")
MOST_FORWARDED = 8192
"""Bytes of these headers together; front ends take no more than twice as much of everything that comes with a call."""
_BODIES = {
    "/v1/chat/completions": schema.ChatCompletionRequest, "/v1/completions": schema.CompletionRequest,
    "/tokenize": schema.TokenizeRequest, "/detokenize": schema.DetokenizeRequest,
}
TOLD = "pagecast_told"
"""An attribute of errors that have a log line."""
_UNREADABLE = "There was an error parsing the body"
"""FastAPI's word for what its JSON parser gives up on."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class CallerGone(Exception):
    """The HTTP client closed its connection; nobody is left to answer."""


def caller(request: Request) -> Metadata:
    """The gRPC metadata of an HTTP request: credentials, trace context, and an id that stands in the logs of both. What is given twice
    is the front end's to refuse. Raises HTTPException for what no metadata can carry."""
    headers = [(name, value) for name in _FORWARDED for value in request.headers.getlist(name)]
    for name, value in headers:
        if not (value.isascii() and value.isprintable()):
            raise HTTPException(400, f"the header {name} must be printable ASCII")
    if (size := sum(len(value) for _, value in headers)) > MOST_FORWARDED:
        raise HTTPException(431, f"the headers {', '.join(_FORWARDED)} must be at most {MOST_FORWARDED} bytes together, not {size}")
    given = request.headers.get("x-request-id", "")
    return (*headers, ("x-request-id", given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)))


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the HTTP client leaves. Raises CallerGone then."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def make_app(backend: Backend, version: str) -> FastAPI:
    """The application. The backend outlives it. app.state.is_ending: it says NOT_SERVING, so that balancers turn elsewhere."""
    about = "OpenAI-compatible HTTP API of a Pagecast cluster"
    # FastAPI's own pages about an API load their code from elsewhere.
    app = FastAPI(title="Pagecast", version=version, description=about, docs_url=None, redoc_url=None)
    app.state.is_ending = False
    gateway = Gateway(backend)
    _add_error_handlers(app, gateway)
    _add_generation(app, gateway)
    _add_models(app, gateway, backend)
    _add_watching(app, backend, version)
    _add_page(app)
    return app


class Gateway:
    """The endpoints that take bodies."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def chat(self, request: Request, asked: schema.ChatCompletionRequest) -> Response:
        """POST /v1/chat/completions."""
        [spec], metadata = await self._specs(request, asked, Faults()), caller(request)
        made = f"chatcmpl-{secrets.token_hex(12)}"
        if asked.stream:
            stream = await while_connected(request, self._backend.stream(spec, metadata))
            base = _base(made, "chat.completion.chunk", stream.first.accepted.model)
            return _events(chunks.chat_chunks(stream, chunks.ChunkWriter(base, asked.stream_options, bool(asked.return_token_ids))))
        answer = await while_connected(request, self._backend.generate(spec, metadata))
        choices = [answers.chat_choice(sequence, bool(asked.return_token_ids)) for sequence in answer.sequences]
        return JSONResponse(_base(made, "chat.completion", answer.model) | {"choices": choices, "usage": answers.usage([answer.usage])})

    async def completion(self, request: Request, asked: schema.CompletionRequest) -> Response:
        """POST /v1/completions."""
        prompts = Prompts(self._backend, asked, await self._specs(request, asked, Faults()), caller(request))
        made = f"cmpl-{secrets.token_hex(12)}"
        if asked.stream:
            return await self._streamed_completion(request, asked, prompts, made)
        found = await while_connected(request, prompts.whole())
        choices: list[dict[str, Any]] = []
        for number, answer in enumerate(found):
            echo = await prompts.echo(number, answer.prompt_logprobs)
            for sequence in answer.sequences:
                choices.append(answers.text_choice(sequence, len(choices), echo, bool(asked.return_token_ids)))
        base = _base(made, "text_completion", found[0].model)
        return JSONResponse(base | {"choices": choices, "usage": answers.usage(answer.usage for answer in found)})

    async def tokenize(self, request: Request, asked: schema.TokenizeRequest, found: Faults) -> dict[str, Any]:
        """POST /tokenize."""
        metadata = caller(request)
        if (asked.prompt is None) == (asked.messages is None):
            found.add("give either prompt or messages", "prompt")
        chat = pb.ChatPrompt()
        translate.fill_chat(chat, asked.messages or [], found)
        try:
            if asked.messages is not None:
                ids = await self._backend.render_chat(chat, asked.model, metadata)
            else:
                ids = await self._backend.tokenize(asked.prompt or "", asked.add_special_tokens, asked.model, metadata)
        except RpcError as error:
            if not found:
                raise
            found.add_refusal(error, {})
        found.refuse()
        limit = [one.limits.max_model_len for one in await self._backend.models(metadata)]
        return {"tokens": ids, "count": len(ids), "max_model_len": limit[0] if limit else 0}

    async def detokenize(self, request: Request, asked: schema.DetokenizeRequest) -> dict[str, Any]:
        """POST /detokenize."""
        return {"prompt": await self._backend.detokenize(asked.tokens, asked.model, caller(request))}

    async def refuse(self, request: Request, given: Any, errors: Sequence[Mapping[str, Any]]) -> None:
        """Raises BadBody with what pydantic found in a body, and with what is wrong with the rest of it."""
        found = faults_of(errors)
        asked = remainder(given, errors, _BODIES[request.url.path]) if request.url.path in _BODIES else None
        try:
            if isinstance(asked, schema.Generation):
                await self._specs(request, asked, found)
            elif isinstance(asked, schema.TokenizeRequest):
                await self.tokenize(request, asked, found)
            elif isinstance(asked, schema.DetokenizeRequest):
                await self.detokenize(request, asked)
        except RpcError as error:
            found.add_refusal(error, {})
        found.refuse()

    async def _specs(self, request: Request, asked: schema.Generation, found: Faults) -> list[pb.GenerationSpec]:
        """What to ask the front ends. Where anything is wrong they are asked what else is, and BadBody is raised."""
        specs = translate.specs_of(asked, found)
        request.state.asked = asked
        if found:
            names = translate.names_of(asked)
            refusals = asyncio.gather(*(self._backend.refusal(spec, caller(request)) for spec in specs))
            errors = {i: error for i, error in enumerate(await while_connected(request, refusals)) if error is not None}
            if isinstance(asked, schema.CompletionRequest) and asked.has_numbers:
                found.add_refusals(errors, len(specs), names)
            else:
                for error in errors.values():
                    found.add_refusal(error, names)
        found.refuse()
        return specs

    async def _streamed_completion(
        self, request: Request, asked: schema.CompletionRequest, prompts: Prompts, made: str
    ) -> Response:
        opened = await while_connected(request, prompts.streams())
        writer = chunks.ChunkWriter(
            _base(made, "text_completion", opened[0].first.accepted.model), asked.stream_options, bool(asked.return_token_ids)
        )
        count = asked.n or 1
        events = [answers.events_without_output(stream) if asked.is_scoring else stream for stream in opened]
        parts = [chunks.CompletionPart(one, writer, i * count, partial(prompts.echo, i)) for i, one in enumerate(events)]

        async def frames() -> AsyncIterator[bytes]:
            try:
                async for piece in merged([part.chunks() for part in parts]):
                    yield piece
                yield writer.last([part.usage for part in parts])
            except RpcError as error:
                yield chunks.frame(of_rpc(error)[1])
            finally:
                for stream in opened:
                    stream.close()

        return _events(frames())


def _base(made: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": made, "object": kind, "created": int(time.time()), "model": model}  # noqa: TID251 - told, never compared


def _events(frames: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: schema.ChatCompletionRequest) -> Response:
        return await gateway.chat(request, asked)

    @app.post("/v1/completions")
    async def completions(request: Request, asked: schema.CompletionRequest) -> Response:
        return await gateway.completion(request, asked)


def _add_models(app: FastAPI, gateway: Gateway, backend: Backend) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [_model(one) for one in await backend.models(caller(request))]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        for one in await backend.models(caller(request)):
            if one.name == name:
                return JSONResponse(_model(one))
        return JSONResponse(body(f"no model {name[:128]!r} is served here", "not_found_error", "model", "model_not_found"), 404)

    @app.post("/tokenize")
    async def tokenize(request: Request, asked: schema.TokenizeRequest) -> dict[str, Any]:
        return await gateway.tokenize(request, asked, Faults())

    @app.post("/detokenize")
    async def detokenize(request: Request, asked: schema.DetokenizeRequest) -> dict[str, Any]:
        return await gateway.detokenize(request, asked)


def _add_watching(app: FastAPI, backend: Backend, version: str) -> None:
    @app.get("/load")
    async def load(request: Request) -> dict[str, Any]:
        now = await backend.load(caller(request))
        state = runtime_pb2.ServingState.Name(now.state).removeprefix("SERVING_STATE_").lower()
        return {"running": now.num_running, "waiting": now.num_waiting, "kv_utilization": now.kv_utilization, "state": state}

    @app.get("/health")
    async def health(request: Request) -> Response:
        serving = not app.state.is_ending and await backend.is_serving(caller(request))
        return JSONResponse({"status": "SERVING" if serving else "NOT_SERVING"}, 200 if serving else 503)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version}


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'; img-src 'self' data:"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in ("chat.js", "chat.css"):
            raise HTTPException(404)
        return FileResponse(PAGE / name)


def _model(one: Any) -> dict[str, Any]:
    return {"id": one.name, "object": "model", "created": 0, "owned_by": "pagecast", "max_model_len": one.limits.max_model_len}


def _add_error_handlers(app: FastAPI, gateway: Gateway) -> None:
    @app.exception_handler(RpcError)
    async def failed(request: Request, error: RpcError) -> Response:
        asked = getattr(request.state, "asked", None)
        status, content, headers = of_rpc(error, {} if asked is None else translate.names_of(asked))
        return JSONResponse(content, status, dict(headers))

    @app.exception_handler(BadBody)
    async def bad(_: Request, error: BadBody) -> Response:
        return JSONResponse(body(str(error), "invalid_request_error", error.param, error.code), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        try:
            await gateway.refuse(request, error.body, error.errors())
        except BadBody as found:
            return await bad(request, found)
        except CallerGone as left:
            return await gone(request, left)
        raise AssertionError("an invalid body has faults")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = error.detail
        if error.status_code == 400 and text == _UNREADABLE:
            text = "the body cannot be read: it is not UTF-8, is nested too deep, or has a number of more digits than fit"
        if error.status_code in (404, 405) and text in ("Not Found", "Method Not Allowed"):
            path = request.url.path
            lacks_v1 = any(getattr(route, "path", "") == f"/v1{path}" for route in app.routes)
            more = f", but /v1{path}: a base URL ends in /v1" if lacks_v1 else "; /openapi.json has what there is"
            text = f"there is no {request.method} {path[:100]} here{more}"
        return JSONResponse(body(text, "invalid_request_error"), error.status_code, error.headers)

    @app.exception_handler(CallerGone)
    async def gone(_: Request, error: CallerGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        error_id = secrets.token_hex(8)
        log.error("unexpected error in an HTTP call", path=request.url.path, error_id=error_id, exc_info=error)
        error.__dict__[TOLD] = True  # it goes on to the server, which would tell it once more
        return JSONResponse(body(f"internal error {error_id}", "server_error"), 500)
