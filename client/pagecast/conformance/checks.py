"""The checks that data files name. Each takes an endpoint and a case's data, and raises Broken where a promise is not kept."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from pagecast.conformance.endpoint import Answer, Broken, Endpoint, Failure, differences, failure_of, hold
from pagecast.v1 import generation_pb2 as pb

Data = dict[str, Any]
Check = Callable[[Endpoint, Data], Awaitable[str]]
"""Gives back a remark for the report, "" for none."""

ROUNDING = 0.15
"""Most that a log-probability of the same model may differ between two batches, in bfloat16."""


class Skipped(Exception):
    """The endpoint does not have what the case is about."""


def spec_of(data: Data, key: str = "spec") -> pb.GenerationSpec:
    """The request of a case."""
    spec: pb.GenerationSpec = ParseDict(data[key], pb.GenerationSpec())
    return spec


def require(endpoint: Endpoint, data: Data) -> None:
    """Skips a case that needs what the endpoint does not have: `needs` names constraints, or a capability."""
    have = endpoint.model.capabilities
    for name in data.get("needs", []):
        kept = name in have.constraints or (name == "chat" and have.chat) or (name == "tools" and have.HasField("tool_call_format"))
        if not kept:
            raise Skipped(f"the model has no {name}")


async def failure(endpoint: Endpoint, data: Data, streaming: bool) -> Failure:
    """How the case's request fails. `raw`: its bytes in hex, instead of a spec."""
    if "raw" in data:
        method = f"/pagecast.v1.GenerationService/Generate{'Stream' if streaming else ''}"
        make: Any = endpoint.channel.unary_stream if streaming else endpoint.channel.unary_unary
        call: Any = make(method)(bytes.fromhex(data["raw"]), timeout=60, metadata=endpoint.metadata)
    elif streaming:
        call = endpoint.stream(spec_of(data), data.get("timeout", 60))
    else:
        request = pb.GenerateRequest(spec=spec_of(data))
        call = endpoint.generation.Generate(request, timeout=data.get("timeout", 60), metadata=endpoint.metadata)
    try:
        if streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return failure_of(error)
    raise Broken("was served, not refused")


async def refused(endpoint: Endpoint, data: Data) -> str:
    """Both methods refuse (or Generate alone: `unary`), with `code`, `reason`, and every path of `fields`."""
    require(endpoint, data)
    for streaming in (False,) if data.get("unary") else (False, True):
        got = await failure(endpoint, data, streaming)
        code = data.get("code", "INVALID_ARGUMENT")
        hold(got.code == code, f"{got.code} ({got.message[:100]}), not {code}")
        wanted = data.get("reason", "FIELD_VIOLATION" if "fields" in data else None)
        hold(wanted is None or got.reason == wanted, f"reason {got.reason}, not {wanted}")
        missing = set(data.get("fields", [])) - set(got.fields)
        hold(not missing, f"no violation of {', '.join(sorted(missing))}; those named: {', '.join(got.fields)}")
        for word in ("Traceback", "Error(", "Exception", "site-packages", "/home/", ".py"):
            hold(word not in got.message, f"the message holds {word!r}")
    return ""


def compare(one: Answer, other: Answer) -> str:
    """Holds two answers to the same request to be the same, unless the model's numbers differed. A remark if they did."""
    for at, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        step = next((n for n, (x, y) in enumerate(zip(a.ids, b.ids)) if x != y), None)
        if step is None:
            continue
        x, y = a.logprobs[step], b.logprobs[step]
        same = [(t.token_id, t.logprob) for t in x.top] == [(t.token_id, t.logprob) for t in y.top]
        hold(not same, f"sequence {at}: equal log-probabilities, but tokens {a.ids[step]} and {b.ids[step]} at {step}")
        gap = max(abs(p.logprob - q.logprob) for p, q in zip(x.top, y.top))
        hold(gap <= ROUNDING, f"sequence {at}: log-probabilities at {step} differ by {gap:.3f}")
        return f"logits differ by {gap:.1e} at token {step}"
    for text in differences(one, other):
        raise Broken(text)
    return ""


def check_shape(spec: pb.GenerationSpec, answer: Answer) -> None:
    """What holds for every answer: lengths, usage, effective values, records beside ids."""
    for output in answer.outputs:
        most = answer.effective.max_output_tokens
        hold(0 < len(output.ids) <= most, f"{len(output.ids)} tokens, not 1 to {most}")
        hold(output.usage.output_tokens == len(output.ids), f"usage says {output.usage.output_tokens} tokens, there are {len(output.ids)}")
        hold([r.token_id for r in output.logprobs] == output.ids, "not one log-probability for each id")
        for record in output.logprobs:
            _check_record(record, spec.output.logprobs.top_n)
    hold(answer.usage.output_tokens == sum(len(o.ids) for o in answer.outputs), "the request's usage is not that of its sequences")


def _check_record(record: pb.TokenLogprob, top_n: int) -> None:
    values = [t.logprob for t in record.top]
    hold(record.HasField("logprob") and -math.inf < record.logprob <= 1e-6, f"log-probability {record.logprob}")
    hold(len(values) == top_n, f"{len(values)} likeliest tokens, not {top_n}")
    hold(values == sorted(values, reverse=True), "the likeliest tokens are not in order")
    hold(sum(math.exp(v) for v in values) <= 1.001, "the likeliest tokens' probabilities sum to more than 1")
    hold(not values or record.logprob <= values[0] + 1e-6, "the token is likelier than the likeliest")
    for t in record.top:
        hold(t.token_id != record.token_id or abs(t.logprob - record.logprob) < 1e-6, "one token has two log-probabilities")


def with_logprobs(spec: pb.GenerationSpec, top_n: int = 5) -> pb.GenerationSpec:
    """The spec, asking for log-probabilities, if it does not."""
    if not spec.output.HasField("logprobs"):
        spec.output.logprobs.top_n = top_n
    return spec


async def same(endpoint: Endpoint, data: Data) -> str:
    """GenerateStream, Generate, and GenerateStream again say the same; `expect` holds for it."""
    require(endpoint, data)
    spec = with_logprobs(spec_of(data))
    answers = [await endpoint.streamed(spec), await endpoint.whole(spec), await endpoint.streamed(spec)]
    remarks = [compare(answers[0], other) for other in answers[1:]]
    for answer in answers:
        check_shape(spec, answer)
        expect(answer, data.get("expect", {}))
    return next(filter(None, remarks), "")


def reason_name(reason: int) -> str:
    """Name of a finish reason."""
    value = pb.FinishReason.DESCRIPTOR.values_by_number.get(reason)
    return str(reason) if value is None else str(value.name)


def expect(answer: Answer, wanted: Data) -> None:
    """Holds an answer to what a case says: see the keys."""
    first = answer.outputs[0]
    facts: Data = {
        "outputs": len(answer.outputs), "tokens": len(first.ids), "reason": reason_name(first.reason), "text": first.text,
        "ids": first.ids, "stop": first.stop, "calls": first.calls, "last": first.ids[-1], "prompt_records": len(answer.prompt_logprobs),
    }  # fmt: skip
    for name, value in wanted.items():
        if name == "effective":
            for field, number in value.items():
                got = getattr(answer.effective, field)
                hold(math.isclose(got, number, rel_tol=1e-6), f"effective.{field} is {got}, not {number}")
        elif name == "only":
            others = {token for output in answer.outputs for token in output.ids} - set(value)
            hold(not others, f"tokens outside {value}: {sorted(others)[:5]}")
        elif name == "least_tokens":
            hold(len(first.ids) >= value, f"{len(first.ids)} tokens, not {value} at least")
        else:
            hold(facts[name] == value, f"{name} is {facts[name]!r}, not {value!r}")


async def seeds(endpoint: Endpoint, data: Data) -> str:
    """The same seed gives the same tokens, another seed others; a seed drawn by the server is told and can be used again."""
    spec = with_logprobs(spec_of(data))
    spec.sampling.ClearField("seed")
    drawn = [await endpoint.whole(spec), await endpoint.streamed(spec)]
    hold(drawn[0].effective.seed != drawn[1].effective.seed, "two requests drew one seed")
    hold(drawn[0].outputs[0].ids != drawn[1].outputs[0].ids, "two seeds gave one output")
    remark = ""
    for answer in drawn:
        spec.sampling.seed = answer.effective.seed
        again = await endpoint.whole(spec)
        hold(again.effective.seed == answer.effective.seed, "the seed given is not the one used")
        remark = compare(answer, again) or remark
    return remark


async def sequences(endpoint: Endpoint, data: Data) -> str:
    """Several sequences are independent: the first is that of a request for one, the others differ, usage adds up."""
    spec = with_logprobs(spec_of(data))
    spec.sampling.num_sequences = 1
    alone = await endpoint.whole(spec)
    spec.sampling.num_sequences = count = data["count"]
    together = [await endpoint.whole(spec), await endpoint.streamed(spec)]
    for answer in together:
        check_shape(spec, answer)
        hold(len(answer.outputs) == count, f"{len(answer.outputs)} sequences, not {count}")
        hold(len({tuple(o.ids) for o in answer.outputs}) == count, "two sequences are the same")
        hold(answer.usage.prompt_tokens == alone.usage.prompt_tokens, "the prompt counts more than once")
    remark = compare(together[0], together[1])
    first = Answer(together[0].effective, together[0].outputs[:1], alone.usage, [])
    return compare(alone, first) or remark


async def prompt_records(endpoint: Endpoint, data: Data) -> str:
    """A prompt's log-probabilities are those that its tokens had as output."""
    spec = with_logprobs(spec_of(data))
    written = (await endpoint.whole(spec)).outputs[0]
    prompt = list(spec.prompt_token_ids.ids)
    spec.prompt_token_ids.ids.extend(written.ids)
    spec.output.prompt_logprobs.top_n = spec.output.logprobs.top_n
    spec.stopping.max_output_tokens = 1
    spec.stopping.ClearField("min_output_tokens")
    for answer in (await endpoint.whole(spec), await endpoint.streamed(spec)):
        records = answer.prompt_logprobs
        hold([r.token_id for r in records] == [*prompt, *written.ids], "not one record for each prompt token")
        hold(not records[0].HasField("logprob"), "the first prompt token has a log-probability")
        hold(answer.usage.cached_prompt_tokens == 0, "the prefix cache was used")
        gaps = [abs(r.logprob - o.logprob) for r, o in zip(records[len(prompt) :], written.logprobs, strict=True)]
        hold(max(gaps) <= ROUNDING, f"differs by {max(gaps):.3f} from what the token had as output")
    return f"largest difference {max(gaps):.1e}"


async def until_idle(endpoint: Endpoint) -> None:
    """Waits for a server without work, where it tells; raises Broken if there never is."""
    for _ in range(600):
        load = await endpoint.load()
        if load is None or not (load.num_running or load.num_waiting or load.num_blocks_referenced):
            return
        await asyncio.sleep(0.1)
    raise Broken("requests or blocks are left after everything was cancelled")
