"""The prompts of one completion request: each a call of its own, within the room that it leaves, and told by its number where wrong."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pagecast.errors import RpcError
from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.gateway import answers, schema, translate
from pagecast_scheduler.gateway.backend import Backend, EventStream, Metadata
from pagecast_scheduler.gateway.errors import Faults, of_rpc

MAX_NAMES = 64
"""Special tokens of a prompt that are shown by name."""
_LIMIT = "spec.stopping.max_output_tokens"

Ask = Callable[[pb.GenerationSpec, Metadata], Awaitable[Any]]


class Prompts:
    """What is asked of the front ends for one body."""

    def __init__(self, backend: Backend, asked: schema.CompletionRequest, specs: Sequence[pb.GenerationSpec], metadata: Metadata) -> None:
        self._backend = backend
        self._asked = asked
        self._specs = specs
        self._metadata = metadata

    async def whole(self) -> list[pb.GenerateResponse]:
        """A whole answer to each. Raises RpcError, and BadBody with all that is wrong with any of them; the others then end."""
        found = await self._of_all(self._backend.generate, asyncio.FIRST_EXCEPTION)
        return [answers.without_output(answer) for answer in found] if self._asked.is_scoring else found

    async def streams(self) -> list[EventStream]:
        """A begun stream of each. Raises as `whole` does."""
        return await self._of_all(self._backend.stream, asyncio.ALL_COMPLETED)

    async def echo(self, number: int, records: Sequence[pb.TokenLogprob]) -> answers.Echo:
        """What the choices of a prompt repeat of it. records: its tokens' log-probabilities. Raises RpcError."""
        if not self._asked.echo:
            return answers.Echo()
        spec = self._specs[number]
        text = spec.prompt_text
        if spec.WhichOneof("input") == "prompt_token_ids":
            text = await self._text_of(spec.prompt_token_ids.ids)
        special = list({record.token_id for record in records if not record.token_bytes})[:MAX_NAMES]
        names = await asyncio.gather(*(self._text_of([token_id]) for token_id in special))
        return answers.Echo(text, records, dict(zip(special, names, strict=True)))

    async def _text_of(self, ids: Sequence[int]) -> str:
        return await self._backend.detokenize(ids, self._asked.model, self._metadata)

    async def _of_all(self, ask: Ask, until: str) -> list[Any]:
        tasks = [asyncio.create_task(self._within_room(ask, number)) for number in range(len(self._specs))]
        is_over = False
        try:
            await asyncio.wait(tasks, return_when=until)
            is_over = True
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            failed = {number: one for number, one in enumerate(found) if isinstance(one, BaseException)}
            if failed or not is_over:
                _close(found)
        if failed:
            await self._refuse(failed)
        return found

    async def _within_room(self, ask: Ask, number: int) -> Any:
        """The answer to one prompt. A limit that its caller did not give is cut to the room that there is."""
        spec, metadata = self._specs[number], _numbered(self._metadata, number)
        try:
            return await ask(spec, metadata)
        except RpcError as error:
            if self._asked.has_own_limit or all(violation.field != _LIMIT for violation in error.violations):
                raise
            room = max(1, await self._backend.room(spec, metadata))  # of 1 where there is none: the prompt is then what is refused
            if room >= spec.stopping.max_output_tokens:
                raise
        cut = pb.GenerationSpec()
        cut.CopyFrom(spec)
        cut.stopping.max_output_tokens = room
        return await ask(cut, metadata)

    async def _refuse(self, failed: Mapping[int, BaseException]) -> None:
        """Raises what `failed` says, by number of the prompt, with what is wrong with those that were ended before they could fail."""
        errors = {number: one for number, one in failed.items() if isinstance(one, RpcError)}
        for one in failed.values():
            if not isinstance(one, RpcError | asyncio.CancelledError):
                raise one
        if not self._asked.has_numbers or not any(error.violations for error in errors.values()):
            raise next(iter((errors or failed).values()))
        left = [number for number in failed if number not in errors]
        begun = await asyncio.gather(*(self._within_room(self._backend.stream, number) for number in left), return_exceptions=True)
        _close(begun)
        errors |= {number: one for number, one in zip(left, begun, strict=True) if isinstance(one, RpcError)}
        named = {number: errors[number] for number in sorted(errors) if errors[number].violations}
        found = Faults()
        found.add_refusals(named, len(self._specs), translate.names_of(self._asked))
        found.refuse(of_rpc(next(iter(named.values())))[1]["error"]["code"])


def _close(found: Sequence[Any]) -> None:
    for one in found:
        if isinstance(one, EventStream):
            one.close()


def _numbered(metadata: Metadata, index: int) -> Metadata:
    """Request ids of the later prompts of one body: the id is unique among a caller's live requests."""
    return metadata if index == 0 else tuple((k, f"{v[:120]}-{index}" if k == "x-request-id" else v) for k, v in metadata)
