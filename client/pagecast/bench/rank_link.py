"""What a step costs the scheduler process with its ranks connected: messages, bytes and processor time, counted while a cluster of oracle
ranks decodes. Steps last long enough that ranks do not take the scheduler's processor from it."""

import os
import socket
import threading
import time
import urllib.request
from typing import Any

RUNNING = 64
STEP_US = 20_000
SECONDS = 4.0


def measure(ranks: int) -> dict[str, float]:
    """Per step: messages and bytes sent and received, and µs of the scheduler's processor time."""
    from pagecast import Client, SamplingParams, cluster
    from pagecast_scheduler.launch.events import ChildStarted, Event

    pids: dict[str, int] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, ChildStarted):
            pids[event.name] = event.pid

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    chosen = cluster.settings(
        executor="oracle", tensor_parallel_size=ranks, oracle_step_us=STEP_US, num_blocks=RUNNING * 80, metrics_port=port
    )
    with cluster.PrivateCluster(chosen, cluster.Watch(on_event)) as private, Client(private.target) as client:
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True, detokenize=False)
        streams = [client.stream([place + 10] * 64, sampling) for place in range(RUNNING)]
        readers = [threading.Thread(target=_read, args=(stream,), daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        while client.load().num_running < RUNNING:
            time.sleep(0.1)
        before = _state(client, port, pids["scheduler"])
        time.sleep(SECONDS)
        after = _state(client, port, pids["scheduler"])
        for stream in streams:
            stream.cancel()
        for reader in readers:
            reader.join()
    steps = after.pop("steps") - before.pop("steps")
    return {name: (value - before[name]) / max(steps, 1) for name, value in after.items()}


def described(figures: dict[str, float]) -> str:
    """The figures of `measure` as part of a line."""
    return (
        f"{figures['messages_sent']:.1f} messages and {figures['bytes_sent']:.0f} bytes out, {figures['messages_received']:.1f} and "
        f"{figures['bytes_received']:.0f} in, {figures['cpu_us']:.0f} µs of the scheduler's processor, all its front end's work included"
    )


def _read(stream: Any) -> None:
    from pagecast.errors import PagecastError

    try:
        for _ in stream:
            pass
    except PagecastError:
        pass  # it was cancelled


def _state(client: Any, port: int, pid: int) -> dict[str, float]:
    """Totals so far. The metrics and the load are told a few times a second; over seconds that is no matter."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {"steps": client.load().step}
    for kind in ("messages", "bytes"):
        for direction in ("sent", "received"):
            start = f'pagecast_rank_{kind}_total{{direction="{direction}"}} '
            found[f"{kind}_{direction}"] = next(float(line.removeprefix(start)) for line in lines if line.startswith(start))
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    found["cpu_us"] = (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")  # utime and stime, see proc_pid_stat(5)
    return found
