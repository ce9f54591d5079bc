"""Checks of the output contract that compute what must come: stop texts by brute force, penalties in float64, cancels in every phase."""

import asyncio
import math
import random
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Sequence

import grpc
from google.protobuf.json_format import MessageToDict

from pagecast.conformance.checks import Data, Skipped, failure, reason_name, require, spec_of, until_idle, with_logprobs
from pagecast.conformance.endpoint import Endpoint, Output, failure_of, hold, joined
from pagecast.v1 import generation_pb2 as pb

AT_ONCE = 16
"""Requests of one case that are under way together."""


def forced(text: str) -> pb.GenerationSpec:
    """A request whose output can be this text alone, at least one character to a token or less."""
    spec = pb.GenerationSpec(prompt_text="Say it:", constraint=pb.Constraint(choices=pb.Choices(texts=[text])))
    spec.sampling.temperature = 0
    return with_logprobs(spec, 0)


def expected(pieces: Sequence[bytes], stops: Sequence[str], least: int) -> tuple[str, str | None, int]:
    """By brute force: (text before the first stop text to be completed, that stop text, tokens up to it); the whole without one."""
    decode = getincrementaldecoder("utf-8")("replace").decode
    text = ""
    for count, piece in enumerate(pieces, 1):
        before, text = len(text), text + decode(piece, count == len(pieces))
        found = [(end, -len(s), s) for s in stops for end in range(before + 1, len(text) + 1) if text[:end].endswith(s)]
        if found and count >= least:
            end, _, stop = min(found)
            return text[: end - len(stop)], stop, count
    return text, None, len(pieces)


async def _gather(endpoint: Endpoint, specs: Sequence[pb.GenerationSpec]) -> list[Output]:
    """The first output of each request, some at once, in turns by stream and by one answer."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, spec: pb.GenerationSpec) -> Output:
        async with room:
            answer = await (endpoint.streamed(spec) if number % 2 else endpoint.whole(spec))
            return answer.outputs[0]

    return await asyncio.gather(*(one(number, spec) for number, spec in enumerate(specs)))


async def stops(endpoint: Endpoint, data: Data) -> str:
    """Every stop text of up to `longest` characters out of a forced text, alone, in pairs, kept, and before a least length."""
    require(endpoint, data)
    text: str = data["text"]
    (base,) = await _gather(endpoint, [forced(text)])
    hold(base.text == text, f"the constraint gave {base.text!r}")
    if base.data.decode("utf-8", "replace") != text:
        raise Skipped("single tokens of this model have no bytes of their own")
    found = sorted({text[i : i + n] for n in range(1, data["longest"] + 1) for i in range(len(text) - n + 1)})
    wanted = [([stop], 0, False) for stop in found]
    wanted += [([a, b], 0, False) for a, b in zip(found, found[len(found) // 2 :])]
    wanted += [([stop], 0, True) for stop in found[::3]] + [([stop], len(base.ids) // 2, False) for stop in found[1::3]]
    wanted += [(["\ufffd"], 0, False), ([text + "!"], 0, False)]
    specs = []
    for stop_texts, least, keep in wanted:
        spec = forced(text)
        spec.stopping.stop_texts.extend(stop_texts)
        spec.stopping.min_output_tokens = least
        spec.stopping.include_stop_in_output = keep
        specs.append(spec)
    for (stop_texts, least, keep), output in zip(wanted, await _gather(endpoint, specs), strict=True):
        _check_stop(output, base, stop_texts, least, keep)
    return f"{len(wanted)} requests"


def _check_stop(output: Output, base: Output, stop_texts: Sequence[str], least: int, keep: bool) -> None:
    shown, stop, count = expected([r.token_bytes for r in base.logprobs], stop_texts, least)
    where = f"stop {stop_texts!r}, at least {least}"
    if output.ids != base.ids[: len(output.ids)]:  # the text was cut into other tokens this time: judge by these
        whole = [r.token_bytes for r in output.logprobs]
        shown, stop, count = expected(whole, stop_texts, least)
    hold(output.stop == stop or (stop is None and isinstance(output.stop, int)), f"{where}: matched {output.stop!r}, not {stop!r}")
    hold(output.text == shown + (stop if keep and stop else ""), f"{where}: text {output.text!r}, not {shown!r}")
    hold(len(output.ids) == count, f"{where}: {len(output.ids)} tokens, not {count}")
    reason = pb.FINISH_REASON_STOP if stop else pb.FINISH_REASON_CONSTRAINT_COMPLETE
    hold(output.reason == reason, f"{where}: reason {reason_name(output.reason)}")


def _adjusted(token_id: int, value: float, counts: Counter[int], prompt: set[int], options: pb.SamplingOptions) -> float:
    """The logit after penalties and bias, in float64. Raises nothing; see docs/api.md for the order."""
    repetition = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    if token_id in prompt or counts[token_id]:
        value = value / repetition if value > 0 else value * repetition
    value -= options.frequency_penalty * counts[token_id] + (options.presence_penalty if counts[token_id] else 0.0)
    return value + next((b.bias for b in options.logit_bias if b.token_id == token_id), 0.0)


def _best_is_chosen(record: pb.TokenLogprob, shift: float, counts: Counter[int], prompt: set[int], options: pb.SamplingOptions) -> bool:
    """Whether the token is the largest of those known, if logits are log-probabilities plus `shift`."""
    chosen = _adjusted(record.token_id, record.logprob + shift, counts, prompt, options)
    return all(chosen >= _adjusted(t.token_id, t.logprob + shift, counts, prompt, options) - 2e-2 for t in record.top)


async def penalties(endpoint: Endpoint, data: Data) -> str:
    """Greedy tokens under penalties and biases are those of a float64 reference over the reported log-probabilities.

    Only the repetition penalty sees where zero is, which log-probabilities do not tell: some shift must explain each token.
    """
    spec = with_logprobs(spec_of(data), 20)
    for answer in (await endpoint.whole(spec), await endpoint.streamed(spec)):
        counts: Counter[int] = Counter()
        prompt = set(spec.prompt_token_ids.ids)
        shifts = [0.0] if not spec.sampling.HasField("repetition_penalty") else [s / 4 for s in range(-80, 240)]
        for step, record in enumerate(answer.outputs[0].logprobs):
            held = any(_best_is_chosen(record, shift, counts, prompt, spec.sampling) for shift in shifts)
            hold(held, f"token {step} ({record.token_id}) is not the best after penalties")
            counts[record.token_id] += 1
        most = max(counts.values())
        hold(most <= data.get("most_repeats", math.inf), f"a token came {most} times")
    return ""


async def cancels(endpoint: Endpoint, data: Data) -> str:
    """A call that is left at any moment leaves nothing behind, and a stream beside it is not touched."""
    require(endpoint, data)
    beside = asyncio.create_task(endpoint.streamed(forced(data["text"])))
    for phase in data["phases"]:
        await asyncio.gather(*(_leave(endpoint, spec_of(data), phase) for _ in range(data.get("times", 4))))
    answer = await beside
    hold(answer.outputs[0].text == data["text"], f"the stream beside gave {answer.outputs[0].text!r}")
    await until_idle(endpoint)
    return f"{len(data['phases'])} phases"


async def _leave(endpoint: Endpoint, spec: pb.GenerationSpec, phase: str | int) -> None:
    """Starts a stream and cancels it: "at once", after "accepted", after so many tokens, or after the "end", twice."""
    call = endpoint.stream(spec)
    seen = 0
    try:
        if phase != "at once":
            async for message in call:
                seen += len(message.event.tokens.token_ids)
                if phase == "accepted" or (isinstance(phase, int) and seen >= phase):
                    break
        call.cancel()
        call.cancel()
    except grpc.RpcError as error:
        hold(failure_of(error).code == "CANCELLED", f"cancelled {phase}: {error.code().name}")


async def request_ids(endpoint: Endpoint, data: Data) -> str:
    """A live request's id is refused to another; the request that has it goes on."""
    spec = spec_of(data)
    spec.request_id = f"conformance-{random.getrandbits(64):x}"
    call = endpoint.stream(spec)
    first = (await call.read()).event
    hold(first.accepted.request_id == spec.request_id, f"the id became {first.accepted.request_id!r}")
    for streaming in (True, False):
        got = await failure(endpoint, {"spec": MessageToDict(spec)}, streaming)
        hold((got.code, got.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE"), f"a second request of that id: {got.code} {got.reason}")
    events = [first]
    while (message := await call.read()) is not grpc.aio.EOF:
        events.append(message.event)
    joined(events)
    return ""


async def deadlines(endpoint: Endpoint, data: Data) -> str:
    """A deadline that passes ends the call with DEADLINE_EXCEEDED and leaves nothing behind."""
    for seconds in data["seconds"]:
        for streaming in (True, False):
            spec = spec_of(data)
            try:
                if streaming:
                    async for _ in endpoint.stream(spec, timeout=seconds):
                        pass
                else:
                    await endpoint.whole(spec, timeout=seconds)
            except grpc.RpcError as error:
                hold(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, f"deadline of {seconds} s: {error.code().name}")
            else:
                hold(False, f"deadline of {seconds} s did not pass")
    await until_idle(endpoint)
    return ""


async def time_budgets(endpoint: Endpoint, data: Data) -> str:
    """A time budget that runs out ends the call well, with what there is of every sequence, and leaves nothing behind."""
    counts = []
    for answer in (await endpoint.whole(spec_of(data)), await endpoint.streamed(spec_of(data))):
        for output in answer.outputs:
            hold(output.reason == pb.FINISH_REASON_TIME_LIMIT, f"reason {reason_name(output.reason)}")
            hold(output.usage.output_tokens == len(output.ids), f"usage says {output.usage.output_tokens} tokens, not {len(output.ids)}")
            counts.append(len(output.ids))
    await until_idle(endpoint)
    return f"{min(counts)} to {max(counts)} tokens"
