"""A cluster with two front ends, each at an address of its own, and what can be done to its processes."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from chaos.detached_client import VOCAB, Caller
from e2e.cli_server import LIMIT_S, Served, serve
from e2e.test_grpc_continuation import run_dir_of, second_frontend

from pagecast import Client
from pagecast.errors import Unavailable

ORACLE = ("--executor", "oracle", "--oracle-vocab-size", str(VOCAB), "--max-model-len", "4096", "--num-blocks", "1024")


@dataclass
class Cluster:
    """served: the supervised processes, of which one front end; other: the address and process of the second."""

    served: Served
    other: str
    second: psutil.Process

    @property
    def run_dir(self) -> Path:
        return run_dir_of(self.served)

    def process(self, role: str) -> psutil.Process:
        """The present process of a role, once there is one."""
        end = time.monotonic() + LIMIT_S
        while not (found := self.served.children()[role]):
            assert time.monotonic() < end, f"no {role}"
            time.sleep(0.02)
        return found[0]

    def kill(self, role: str) -> int:
        """SIGKILL; the pid that is gone."""
        process = self.process(role)
        process.kill()
        process.wait(LIMIT_S)
        return process.pid

    @contextmanager
    def stopped(self, process: psutil.Process) -> Iterator[None]:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was given up meanwhile, and killed
                os.kill(process.pid, signal.SIGCONT)

    @asynccontextmanager
    async def channels(self) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Channel]]:
        """To the supervised front end, and to the other."""
        async with grpc.aio.insecure_channel(self.served.address) as first, grpc.aio.insecure_channel(self.other) as second:
            yield first, second

    async def wait_idle(self) -> None:
        """Nothing runs, nothing waits, both front ends serve: nothing of what was done has stayed."""
        end = time.monotonic() + LIMIT_S
        while True:
            with Client(self.other) as client, Client(self.served.address) as supervised:
                load = client.load(timeout=10)
                serving = client.health() == "SERVING" and _health(supervised) == "SERVING"
                if serving and not (load.num_running or load.num_waiting):
                    return
            assert time.monotonic() < end, load
            await asyncio.sleep(0.05)


def _health(client: Client) -> str:
    """What a front end says of itself, or that nobody listens."""
    try:
        return client.health()
    except Unavailable:
        return "nobody listens"


@contextmanager
def cluster(*words: str) -> Iterator[Cluster]:
    with serve(*ORACLE, *words) as served, second_frontend(served) as (process, other):
        yield Cluster(served, other, psutil.Process(process.pid))
        text = "".join(served.lines)
        assert "Traceback" not in text, text[-4000:]


async def in_every_phase(first: grpc.aio.Channel) -> list[Caller]:
    """Accepted requests of every kind, to a cluster that takes six at once: most decode, the last ones prefill or wait."""
    kinds = [{"num_sequences": 2}, {}, {"options": {"constraint": {"regex": "[0-9]+"}}}]
    callers = [Caller(f"kind-{os.urandom(4).hex()}", [i + 1] * 40, 300, seed=i, **kind) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    callers += [Caller(f"long-{os.urandom(4).hex()}", list(range(1, 1500)), 60, seed=7 + i) for i in range(4)]
    for caller in callers:
        caller.begin(first)
    for caller in callers:
        await caller.accepted()
    await callers[0].read(at_least=8)
    return callers
