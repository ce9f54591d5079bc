"""The load generator in several processes, so that the client is not what is measured: JSON lines over two pipes to each.

One Python process reads some ten thousand messages a second. All processes time their requests from the same moment of the
machine's monotonic clock.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from pagecast.bench.load import Ask, GrpcTarget, OpenAITarget, Target, Timeline, run_load

_HEAD_START_S = 0.3
"""From handing out the requests to the first arrival: long enough for every process to have read its share."""


class Generators:
    """Processes that load one server. kind: "grpc" or "openai"; address: HOST:PORT, or a base URL."""

    def __init__(self, kind: str, address: str, count: int) -> None:
        """Raises ValueError for a count below 1."""
        if count < 1:
            raise ValueError(f"there must be at least 1 client, not {count}")
        command = [sys.executable, "-m", "pagecast.bench.load_process", kind, address]
        self._processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]

    def run(self, asks: list[Ask]) -> tuple[list[Timeline], float]:
        """Sends every ask at its time. Returns a timeline each and the seconds until the last ended."""
        start = time.monotonic() + _HEAD_START_S
        for number, process in enumerate(self._processes):
            self._tell(process, {"start": start, "asks": [asdict(ask) for ask in asks[number :: len(self._processes)]]})
        lines: list[Timeline] = []
        for process in self._processes:
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"a load generator ended with {process.wait()}")
            lines += [Timeline(one["scheduled"], [(at, count) for at, count in one["marks"]], one["error"]) for one in json.loads(answer)]
        ends = [line.marks[-1][0] for line in lines if line.marks]
        return lines, max(ends, default=time.monotonic() - start)

    def _tell(self, process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.wait()


async def _serve(kind: str, address: str) -> None:
    """Runs shares until standard input ends."""
    target: Target = GrpcTarget(address) if kind == "grpc" else OpenAITarget(address)
    loop = asyncio.get_running_loop()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            share = json.loads(line)
            lines, _ = await run_load(target, [Ask(**ask) for ask in share["asks"]], share["start"])
            answers.write(json.dumps([asdict(one) for one in lines]) + "\n")
            answers.flush()
    finally:
        await target.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2]))
