"""Checks of constrained output: what came is held to the constraint by a validator that knows nothing of masks."""

import asyncio
import json
import re
from typing import Any

from pagecast.conformance.checks import Data, reason_name, require, spec_of
from pagecast.conformance.endpoint import Answer, Broken, Endpoint, Output, hold
from pagecast.conformance.random_schemas import text_of
from pagecast.v1 import generation_pb2 as pb

AT_ONCE = 16


def validator(text: str) -> Any:
    """A validator of a JSON Schema that also looks at formats."""
    import jsonschema

    kind = jsonschema.validators.validator_for(json.loads(text), default=jsonschema.Draft202012Validator)
    return kind(json.loads(text), format_checker=jsonschema.FormatChecker())


def check_json(output: Output, schema: str) -> bool:
    """Holds a whole output to a schema; False if it was cut by its length, which is no fault of the constraint."""
    if output.reason == pb.FINISH_REASON_LENGTH:
        return False
    hold(output.reason == pb.FINISH_REASON_CONSTRAINT_COMPLETE, f"reason {reason_name(output.reason)}")
    try:
        value = json.loads(output.text)
    except ValueError:
        raise Broken(f"no JSON: {output.text[:80]!r}") from None
    fault = next(iter(validator(schema).iter_errors(value)), None)
    hold(fault is None, f"{output.text[:60]!r} against {schema[:80]}: {fault and fault.message[:80]}")
    return True


async def schemas(endpoint: Endpoint, data: Data) -> str:
    """Outputs for `count` random schemas from `first` on, sampled, fit them as jsonschema sees it. At most a fifth may be cut short."""
    require(endpoint, data)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> bool:
        spec = spec_of(data)
        spec.constraint.json_schema = text_of(seed)
        spec.sampling.seed = seed
        async with room:
            answer: Answer = await (endpoint.streamed(spec) if seed % 2 else endpoint.whole(spec))
        try:
            return check_json(answer.outputs[0], spec.constraint.json_schema)
        except Broken as broken:
            raise Broken(f"schema {seed}: {broken}") from None

    whole = await asyncio.gather(*(one(seed) for seed in range(data["first"], data["first"] + data["count"])))
    hold(sum(whole) >= 0.8 * len(whole), f"only {sum(whole)} of {len(whole)} came to their end")
    return f"{sum(whole)} of {len(whole)} whole"


async def fits(endpoint: Endpoint, data: Data) -> str:
    """Every output of a constrained request fits: `matches` (a regular expression for the whole text), `one_of`, or the JSON Schema. One
    that may go on for ever may be cut by its length, where `begins` matches it."""
    require(endpoint, data)
    spec = spec_of(data)
    for answer in (await endpoint.whole(spec), await endpoint.streamed(spec)):
        for output in answer.outputs:
            if "begins" in data and output.reason == pb.FINISH_REASON_LENGTH:
                hold(bool(re.fullmatch(data["begins"], output.text, re.S)), f"text {output.text[:80]!r}")
                continue
            hold(output.reason == pb.FINISH_REASON_CONSTRAINT_COMPLETE, f"reason {reason_name(output.reason)}: {output.text[:60]!r}")
            hold("matches" not in data or bool(re.fullmatch(data.get("matches", ""), output.text, re.S)), f"text {output.text[:80]!r}")
            hold("one_of" not in data or output.text in data["one_of"], f"text {output.text[:80]!r}")
            if spec.constraint.HasField("json_schema"):
                check_json(output, spec.constraint.json_schema)
            if spec.constraint.HasField("json_object"):
                hold(isinstance(json.loads(output.text), dict), f"no JSON object: {output.text[:80]!r}")
    return ""


async def forced_call(endpoint: Endpoint, data: Data) -> str:
    """A demanded tool call comes as a typed field, with arguments that fit the tool's schema, and no text beside it."""
    require(endpoint, data)
    spec = spec_of(data)
    tools = {tool.name: tool.parameters_json_schema for tool in spec.chat.tools}
    for answer in (await endpoint.whole(spec), await endpoint.streamed(spec)):
        output = answer.outputs[0]
        hold(len(output.calls) == 1 and not output.text, f"{len(output.calls)} calls, text {output.text[:60]!r}")
        name, arguments = output.calls[0]
        hold(name in tools, f"a call of {name!r}")
        fault = next(iter(validator(tools[name]).iter_errors(json.loads(arguments))), None)
        hold(fault is None, f"arguments {arguments[:80]!r}: {fault and fault.message[:80]}")
    return ""
