"""`pagecast bench latency`: one request alone (workload `single`), ours beside a peer. The same measurement as throughput."""

import argparse

from pagecast.cli import bench_throughput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_throughput.add_arguments(parser, "single")


run = bench_throughput.run
