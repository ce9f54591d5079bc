"""`pagecast bench streams`: a thousand streams at once, and stalled readers beside live ones; a cluster of its own runs the oracle."""

import argparse
import asyncio
import time
from contextlib import suppress

from pagecast.bench import crowd, results
from pagecast.cli.quantities import ANY_COUNT, COUNT, SECONDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=COUNT, default=1000, help="streams open at once (default: %(default)s)")
    parser.add_argument("--seconds", type=SECONDS, default=60.0, help="for how long (default: %(default)s)")
    parser.add_argument("--tokens", type=COUNT, default=200, help="tokens of each stream (default: %(default)s)")
    parser.add_argument("--step-us", type=ANY_COUNT, default=20_000, help="time of one step of the oracle (default: %(default)s)")
    parser.add_argument("--stalled", type=ANY_COUNT, default=1000, help="readers that never read, 0: leave them out (default: %(default)s)")
    parser.add_argument("--live", type=COUNT, default=64, help="readers beside them whose gaps are measured (default: %(default)s)")
    parser.add_argument("--stalled-seconds", type=SECONDS, default=20.0, help="for how long, with and without them (default: %(default)s)")
    parser.add_argument("--settle-seconds", type=SECONDS, default=40.0, help="until every stalled reader is paused (default: %(default)s)")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="of the comparison; the median counts (default: %(default)s)")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")


def run(args: argparse.Namespace) -> int:
    results.check_folder(args.results)
    from pagecast import cluster
    from pagecast_scheduler.launch.events import ChildStarted, Event

    pids: dict[str, int] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, ChildStarted):
            pids[event.name] = event.pid

    width = max(args.streams, args.stalled + args.live)
    options = cluster.settings(
        executor="oracle", oracle_vocab_size=2048, oracle_step_us=args.step_us, max_num_seqs=width, max_queued_requests=2 * width,
        max_model_len=1 << 17, num_blocks=400_000, max_num_batched_tokens=max(2048, 2 * width), slow_consumer_timeout_s=600.0,
    )
    with cluster.PrivateCluster(options, cluster.Watch(on_event)) as private:
        # Over TCP, as clients come; the Unix socket of a private cluster is its owner's.
        return asyncio.run(measure(args, private.addresses[0], crowd.Process(pids["frontend-0"])))


async def measure(args: argparse.Namespace, target: str, process: crowd.Process) -> int:
    metrics, lost = await measure_many(args, target, process)
    if args.stalled:
        more, lost_beside = await measure_stalled(args, target, process)
        metrics |= more
        lost += lost_beside
    path = results.write(args.results, "streams", metrics, {"lost": lost[:20]})
    print(f"written to {path}")
    return 1 if lost else 0


async def measure_many(args: argparse.Namespace, target: str, process: crowd.Process) -> tuple[dict[str, float], list[str]]:
    """All streams at once, each followed by the next."""
    readers = crowd.Crowd(target, args.streams)
    memory: list[float] = []
    await crowd.run_readers(readers, min(args.streams, 50), 20, 0.5)  # connections and caches are not what is measured
    sampler = asyncio.create_task(crowd.sample_rss(process, 1.0, memory))
    start, cpu = time.monotonic(), process.cpu_s()
    tally = await crowd.run_readers(readers, args.streams, args.tokens, args.seconds)
    elapsed, cpu = time.monotonic() - start, process.cpu_s() - cpu
    sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    await readers.close()
    third = len(memory) // 3
    metrics = {
        "streams.open": args.streams, "streams.finished": tally.finished, "streams.lost": len(tally.lost),
        "streams.messages_per_s": tally.messages / elapsed, "streams.tokens_per_s": tally.tokens / elapsed,
        "streams.messages_per_frontend_core_s": tally.messages / max(cpu, 1e-9), "streams.frontend_cores": cpu / elapsed,
        "streams.rss_mib.first_third": max(memory[: third or 1]), "streams.rss_mib.last_third": max(memory[-third or -1 :]),
    }  # fmt: skip
    print(f"{args.streams} streams for {elapsed:.0f} s: {tally.finished} finished, {len(tally.lost)} lost, "
          f"{tally.messages / elapsed:.0f} messages/s and {tally.tokens / elapsed:.0f} tokens/s")
    print(f"front end: {tally.messages / max(cpu, 1e-9):.0f} messages per second of one core, {cpu / elapsed:.2f} cores busy, "
          f"{metrics['streams.rss_mib.first_third']:.0f} MiB in the first third of the time and "
          f"{metrics['streams.rss_mib.last_third']:.0f} MiB in the last", flush=True)
    return metrics, [*tally.lost]


async def measure_stalled(args: argparse.Namespace, target: str, process: crowd.Process) -> tuple[dict[str, float], list[str]]:
    """Gaps between messages of live readers, in turns without and with readers that have stopped reading."""
    live = crowd.Crowd(target, args.live)
    pairs: list[tuple[float, float]] = []
    lost: list[str] = []
    grown = 0.0
    for _ in range(args.repetitions):
        alone = await crowd.run_readers(live, args.live, args.tokens, args.stalled_seconds, keeps_gaps=True)
        sleepers = crowd.Crowd(target, args.stalled, crowd.NARROW)
        calls = await crowd.stall(sleepers, args.stalled, 100_000)
        await asyncio.sleep(args.settle_seconds)  # windows and queues fill up, and the requests are paused
        before = process.rss_mib()
        beside = await crowd.run_readers(live, args.live, args.tokens, args.stalled_seconds, keeps_gaps=True)
        grown = max(grown, process.rss_mib() - before)
        lost += [*alone.lost, *beside.lost]
        for call in calls:
            call.cancel()
        await sleepers.close()
        pairs.append((1000 * results.percentiles(alone.gaps)["p99"], 1000 * results.percentiles(beside.gaps)["p99"]))
        print(f"p99 between messages of {args.live} live streams: {pairs[-1][0]:.1f} ms alone, {pairs[-1][1]:.1f} ms beside "
              f"{args.stalled} stalled ones", flush=True)
    await live.close()
    alone_ms, beside_ms = sorted(pairs, key=lambda pair: pair[1] / pair[0])[len(pairs) // 2]
    print(f"ratio {beside_ms / alone_ms:.2f}; the front end grew by {grown:.0f} MiB meanwhile")
    return {
        "stalled.readers": args.stalled, "stalled.p99_ms_alone": alone_ms, "stalled.p99_ms_beside": beside_ms,
        "stalled.p99_ratio": beside_ms / alone_ms, "stalled.rss_growth_mib": grown,
    }, lost  # fmt: skip
