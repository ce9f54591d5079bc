"""A running cluster under every fault that a process can meet: killed, stopped, starved, its files gone. No token is lost or repeated."""

import asyncio
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos.cluster import ORACLE, Cluster, cluster, in_every_phase
from chaos.detached_client import Caller
from e2e.cli_server import LIMIT_S, PAGECAST, Served

from pagecast import Client, SamplingParams
from pagecast.errors import Unavailable

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("--oracle-step-us", "10000", "--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--step-deadline-s", "5") as made:
        yield made


async def finish(callers: list[Caller], elsewhere: object) -> None:
    await asyncio.gather(*(caller.finish(elsewhere) for caller in callers))  # type: ignore[arg-type]
    for caller in callers:
        caller.check()


@pytest.mark.parametrize("role", ["worker", "scheduler", "frontend"])
async def test_killed_while_requests_are_in_every_phase(running: Cluster, role: str) -> None:
    async with running.channels() as (first, second):
        callers = await in_every_phase(first)
        running.kill(role)
        await finish(callers, second)
        await running.wait_idle()


@pytest.mark.parametrize("pair", ["worker scheduler", "frontend worker", "frontend scheduler"])
async def test_two_killed_at_once(running: Cluster, pair: str) -> None:
    """A front end and the scheduler together are two deaths: what only these two knew is lost, what another front end reads is not."""
    async with running.channels() as (first, second):
        callers = await in_every_phase(second)
        for role in pair.split():
            running.kill(role)
        await finish(callers, first)
        await running.wait_idle()


@pytest.mark.parametrize("role", ["worker", "scheduler", "frontend", "supervisor"])
async def test_stopped_for_longer_than_any_silence_is_forgiven(running: Cluster, role: str) -> None:
    async with running.channels() as (first, second):
        callers = await in_every_phase(first)
        process = psutil.Process(running.served.process.pid) if role == "supervisor" else running.process(role)
        with running.stopped(process):
            await asyncio.sleep(7.0)  # the fault itself
        await finish(callers, second)
        await running.wait_idle()


@pytest.mark.parametrize("role", ["scheduler", "frontend"])
async def test_stopped_for_good_is_given_up_and_started_again(running: Cluster, role: str) -> None:
    async with running.channels() as (first, second):
        callers = await in_every_phase(first)
        process = running.process(role)
        process.suspend()
        if role == "scheduler":
            end = time.monotonic() + LIMIT_S
            with Client(running.served.address) as client:
                while client.health() == "SERVING":
                    assert time.monotonic() < end, "healthy although nothing moves"
                    await asyncio.sleep(0.05)
        await finish(callers, second)
        await running.wait_idle()
    process.wait(LIMIT_S)
    name = role if role == "scheduler" else "frontend-0"
    assert any(f'"name": "{name}"' in line and '"process hangs"' in line for line in running.served.lines)


async def test_killed_while_others_drain() -> None:
    """SIGTERM with work under way; then one process after the other is killed. It ends with what it had promised, and leaves nothing."""
    with cluster("--oracle-step-us", "10000", "--max-num-seqs", "6", "--drain-timeout-s", "60") as running:
        processes = [process for role in running.served.children().values() for process in role]
        async with running.channels() as (first, _):
            callers = await in_every_phase(first)
            running.served.process.send_signal(signal.SIGTERM)
            await callers[0].read(at_least=16)
            running.kill("worker")
            await callers[0].read(at_least=24)
            running.kill("scheduler")
            await asyncio.gather(*(caller.read() for caller in callers))
            for caller in callers:
                caller.check()
        assert running.served.process.wait(LIMIT_S) == 0
    assert not any(process.is_running() for process in processes)


async def test_the_run_directorys_files_are_gone() -> None:
    """Connections that are there go on. What starts anew afterwards cannot be found, and the cluster says so rather than hang."""
    with cluster("--oracle-step-us", "5000") as doomed:
        async with doomed.channels() as (first, second):
            callers = await in_every_phase(first)
            folder = doomed.run_dir
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
            await finish(callers, second)
            assert doomed.served.end() == 0


@pytest.mark.parametrize("role", ["scheduler", "worker", "frontend"])
async def test_out_of_file_descriptors(running: Cluster, role: str) -> None:
    async with running.channels() as (first, second):
        callers = await in_every_phase(first)
        process = running.process(role)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds(), before[1]))
        extra = [Caller(f"x-{role}-{i}", [9, i], 20, seed=i) for i in range(3)]
        try:
            for caller in extra:
                caller.begin(second)
            await asyncio.gather(*(caller.finish(second) for caller in extra))
        finally:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        await finish([*callers, *extra], second)
        await running.wait_idle()
    assert process.is_running()


@pytest.mark.parametrize("is_gone", [False, True])
def test_nobody_reads_the_log(is_gone: bool) -> None:
    """A log reader that stalls, or has left, costs log lines and nothing else: neither requests nor the repair of a dead process."""
    words = [*PAGECAST, "serve", "--port", "0", "--drain-announce-s", "0", *ORACLE, "--log-level", "debug"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    try:
        address = process.stdout.readline().split(" on ")[-1].strip()
        if is_gone:
            process.stderr.close()
        served = Served(process, address)
        with Client(address) as client:
            for seed in range(500):
                assert len(client.generate([1, 2, 3], SamplingParams(max_tokens=2, seed=seed, ignore_eos=True)).token_ids) == 2
            for role in ("worker", "scheduler"):
                served.children()[role][0].kill()
                end = time.monotonic() + LIMIT_S
                while True:
                    try:
                        assert len(client.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)).token_ids) == 20
                        break
                    except Unavailable:
                        assert time.monotonic() < end, "it does not recover"
                        time.sleep(0.05)
    finally:
        process.terminate()
        code = process.wait(LIMIT_S)
        process.stdout.close()
        process.stderr.close()
    assert code == 0


async def test_a_recording_on_a_full_disk() -> None:
    with cluster("--oracle-step-us", "2000", "--record", "/dev/full") as full:
        async with full.channels() as (first, second):
            callers = await in_every_phase(first)
            await finish(callers, second)
            end = time.monotonic() + LIMIT_S
            while not any("ecording" in line for line in full.served.lines):
                assert time.monotonic() < end, full.served.lines
                await asyncio.sleep(0.1)
        assert full.served.end() == 0


async def test_what_comes_and_goes_leaves_no_file_open(running: Cluster) -> None:
    """Short requests, cancels, detached ones that are forgotten, connections: afterwards every process holds what it held before."""
    names = ("scheduler", "worker", "frontend")

    async def crowd(number: int) -> None:
        async with running.channels() as (first, second):
            callers = [Caller(f"c-{number}-{i}", [i + 1] * 9, 4, seed=i).begin(second if i % 2 else first) for i in range(40)]
            for i, caller in enumerate(callers):
                await caller.accepted()
                if i % 3:
                    await caller.leave()
            await asyncio.gather(*(caller.read() for caller in callers[::3]))
        await running.wait_idle()

    await crowd(0)
    before = {name: running.process(name).num_fds() for name in names}
    for number in range(1, 6):
        await crowd(number)
    end = time.monotonic() + LIMIT_S
    while any(running.process(name).num_fds() > before[name] + 3 for name in names):
        assert time.monotonic() < end, (before, {name: running.process(name).num_fds() for name in names})
        await asyncio.sleep(0.1)


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *offset;
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void begin(void) {
    real = dlsym(RTLD_NEXT, "clock_gettime");
    int fd = open(getenv("TEST_CLOCK_OFFSET"), O_RDONLY);
    offset = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
}
int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset;
    return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""A wall clock that a test can move, for every process of a cluster and all libraries in it."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="moving a clock needs a C compiler")
async def test_the_wall_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour to and fro: no deadline, grace, retention or health check notices."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"], check=True)
    offset = tmp_path / "offset"
    offset.write_bytes(bytes(8))
    monkeypatch.setenv("TEST_CLOCK_OFFSET", str(offset))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "clock.so"))
    with cluster("--oracle-step-us", "10000", "--max-num-seqs", "6") as running:
        monkeypatch.delenv("LD_PRELOAD")
        async with running.channels() as (first, second):
            for jump in (3600, -3600, 0):
                callers = await in_every_phase(first)
                left = callers.pop()
                await left.leave()
                with offset.open("r+b") as file:
                    file.write(jump.to_bytes(8, "little", signed=True))
                with Client(running.served.address) as client:
                    assert client.health() == "SERVING"
                    assert len(client.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True), timeout=60.0).token_ids) == 5
                await left.come_back(second)
                await finish([*callers, left], second)
            running.kill("scheduler")
            await running.wait_idle()
        hours = {line.split('"timestamp": "')[1][11:13] for line in running.served.lines if '"timestamp": "' in line}
    assert len(hours) >= 2, "the clock did jump"
