"""Runs cases against an endpoint, group by group, with a canary stream beside those that send bad input."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import grpc

from pagecast.conformance import checks, contract_checks, resume_checks, structured_checks
from pagecast.conformance.cases import Case
from pagecast.conformance.endpoint import Broken, Endpoint, failure_of
from pagecast.v1 import generation_pb2 as pb

CHECKS: dict[str, checks.Check] = {
    "refused": checks.refused,
    "same": checks.same,
    "seeds": checks.seeds,
    "sequences": checks.sequences,
    "prompt_records": checks.prompt_records,
    "stops": contract_checks.stops,
    "penalties": contract_checks.penalties,
    "cancels": contract_checks.cancels,
    "request_ids": contract_checks.request_ids,
    "resume": resume_checks.resume,
    "cancel_by_id": resume_checks.cancel_by_id,
    "deadlines": contract_checks.deadlines,
    "time_budgets": contract_checks.time_budgets,
    "schemas": structured_checks.schemas,
    "fits": structured_checks.fits,
    "forced_call": structured_checks.forced_call,
}
"""Checks by the names that data files use."""

CASE_LIMIT_S = 900.0
CANARY = pb.GenerationSpec(
    prompt_text="One, two, three, four,", sampling=pb.SamplingOptions(temperature=0),
    stopping=pb.StoppingOptions(max_output_tokens=64, ignore_eos=True),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What came of one case. outcome: "passed", "failed" or "skipped"; remark: why, or what is worth knowing."""

    case: Case
    outcome: str
    remark: str
    seconds: float


async def run_case(endpoint: Endpoint, case: Case) -> Result:
    """One case to its end, whatever happens."""
    start = time.monotonic()
    outcome = "failed"
    try:
        remark = await asyncio.wait_for(CHECKS[case.check](endpoint, case.data), CASE_LIMIT_S)
        outcome = "passed"
    except checks.Skipped as why:
        outcome, remark = "skipped", str(why)
    except Broken as broken:
        remark = str(broken)
    except TimeoutError:
        remark = f"no end after {CASE_LIMIT_S:g} s"
    except grpc.RpcError as error:
        failure = failure_of(error)
        remark = f"{failure.code} {failure.reason}: {failure.message[:160]}"
    except (LookupError, ValueError, TypeError) as error:
        remark = f"{type(error).__name__}: {error}"[:200]
    return Result(case, outcome, remark, time.monotonic() - start)


async def _in_turn(endpoint: Endpoint, case: Case, room: asyncio.Semaphore) -> Result:
    async with room:
        return await run_case(endpoint, case)


class Canary:
    """A greedy stream that runs again and again beside bad inputs and must stay what it was, token for token."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._wanted: list[int] = []
        self._ended = asyncio.Event()
        self.num_runs = 0

    async def start(self) -> None:
        """Learns what the stream is when nothing else happens."""
        await self._endpoint.whole(CANARY)  # so that later runs all find its prompt in the cache
        self._wanted = (await self._endpoint.whole(CANARY)).outputs[0].ids
        self._task = asyncio.create_task(self._sing())

    async def _sing(self) -> None:
        while True:
            ids = (await self._endpoint.streamed(CANARY)).outputs[0].ids
            if ids != self._wanted:
                step = next((n for n, (a, b) in enumerate(zip(ids, self._wanted)) if a != b), min(len(ids), len(self._wanted)))
                raise Broken(f"the stream beside changed at token {step}")
            self.num_runs += 1
            if self._ended.is_set():
                return

    async def end(self, group: str) -> Result:
        """Lets the stream come to an end; how it went."""
        self._ended.set()
        case = Case(group, "canary", "a stream beside them stays token-exact", {})
        start = time.monotonic()
        try:
            await self._task
        except (Broken, grpc.RpcError) as error:
            return Result(case, "failed", str(error)[:200], time.monotonic() - start)
        return Result(case, "passed", f"{self.num_runs} runs", time.monotonic() - start)


def groups_of(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases by group, in their order."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return found


async def run(endpoint: Endpoint, cases: Sequence[Case]) -> AsyncIterator[Result]:
    """Every case's result as it is known."""
    for group, members in groups_of(cases).items():
        canary = Canary(endpoint) if any(case.check == "refused" for case in members) else None
        if canary is not None:
            await canary.start()
        room = asyncio.Semaphore(members[0].together)
        for result in asyncio.as_completed([_in_turn(endpoint, case, room) for case in members]):
            yield await result
        if canary is not None:
            yield await canary.end(group)
