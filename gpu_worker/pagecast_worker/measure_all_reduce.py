"""How long a sum over ranks takes, by message size and by the way it goes: what the launch table in pagecast_kernels.configs is made from.

`python -m pagecast_worker.measure_all_reduce RANK SIZE FILE`, one process a rank, FILE a path that all of them see and that does not
exist yet. Every way is checked against a sum in float64 first, bit for bit between ranks, then timed inside CUDA graphs. Rank 0 prints
one JSON object: {"bytes": {"way": microseconds}}. Without GPUs the ranks sum over gloo, and only that is timed.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pagecast_kernels import triton_ops
from pagecast_kernels.all_reduce import MAX_PROGRAMS, all_reduce, all_reduce_add_rms_norm
from pagecast_kernels.configs import AllReduce
from pagecast_worker.group import NO_MULTICAST
from pagecast_worker.parallel import ByTorch, Ranks
from pagecast_worker.peer_memory import PeerMemory

SIZES = [1 << bits for bits in range(13, 24)]
HIDDEN = 4096
"""Elements of a row where the residual sum and the norm are part of what is timed; in bf16 a row is the smallest message."""
LIMITS = AllReduce(one_shot=SIZES[-1], two_shots=SIZES[-1], fused_rows=MAX_PROGRAMS)
CALLS = 20
REPLAYS = 10

Way = Callable[[Tensor], Tensor]


def main(arguments: list[str]) -> int:
    rank, size, path = int(arguments[0]), int(arguments[1]), arguments[2]
    os.environ.update(NO_MULTICAST)
    is_cuda = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size, device_id=device if is_cuda else None
    )
    ranks = Ranks(rank, size, ByTorch(device))
    peers = PeerMemory(ranks, device, HIDDEN, torch.bfloat16, LIMITS) if is_cuda else None
    found = {nbytes: measure(ranks, device, peers, nbytes) for nbytes in SIZES}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # memory that peers can see has no order of being torn down


def measure(ranks: Ranks, device: torch.device, peers: PeerMemory | None, nbytes: int) -> dict[str, float]:
    """Microseconds of a call by each way. Raises AssertionError where a way gives another sum."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = max(nbytes // HIDDEN // dtype.itemsize, 1)
    generator = torch.Generator(device=device).manual_seed(ranks.rank + 7)
    x = torch.randn((rows, HIDDEN), generator=generator, device=device).to(dtype)
    exact = ranks.all_gather(x).view(rows, ranks.size, HIDDEN).double().sum(1)
    found = {}
    for name, (way, is_sum) in ways(ranks, peers, rows, x).items():
        got = way(x.clone())
        if is_sum:
            assert torch.allclose(got.double(), exact, rtol=2e-2, atol=2e-2), f"{name} of {nbytes} bytes: wrong sum"
        everyones = ranks.all_gather(got).view(rows, ranks.size, HIDDEN)
        assert bool((everyones == everyones[:, :1]).all()), f"{name} of {nbytes} bytes: ranks differ"
        found[name] = timed(ranks, way, torch.zeros_like(x))
    return found


def ways(ranks: Ranks, peers: PeerMemory | None, rows: int, like: Tensor) -> dict[str, tuple[Way, bool]]:
    """Every way there is for so many rows, and whether it gives the sum; else the sum goes into a residual, and that normed comes back."""
    found: dict[str, tuple[Way, bool]] = {"nccl" if like.is_cuda else "gloo": (ranks.all_reduce, True)}
    if peers is None:
        return found
    flat, wide = peers.flat, peers.rows
    residual, weight = torch.ones_like(like), torch.ones_like(like[0])
    found["one shot"] = (lambda x: all_reduce(x, flat), True)
    if ranks.size & (ranks.size - 1) == 0:
        found["two shots"] = (lambda x: all_reduce(x, flat, two_shots=True), True)
    found["nccl, then norm"] = (lambda x: triton_ops.add_rms_norm(ranks.all_reduce(x), residual, weight, 1e-5), False)
    found["one shot, then norm"] = (lambda x: triton_ops.add_rms_norm(all_reduce(x, flat), residual, weight, 1e-5), False)
    if rows <= wide.places:
        found["one shot with norm"] = (lambda x: all_reduce_add_rms_norm(x, residual, weight, 1e-5, wide), False)
    return found


def timed(ranks: Ranks, way: Way, zeros: Tensor) -> float:
    """Microseconds of a call, the slowest rank's: in a CUDA graph of many calls, or one by one on a CPU. zeros: so that sums stay small."""
    if zeros.is_cuda:
        way(zeros)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                way(zeros)
        once, calls = graph.replay, CALLS
    else:
        once, calls = lambda: way(zeros), 1
    best = float("inf")
    for _ in range(REPLAYS):
        ranks.all_agree(True)
        began = time.perf_counter()
        once()
        if zeros.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    slowest = ranks.all_gather(torch.tensor([[best / calls * 1e6]], device=zeros.device)).max()
    return round(float(slowest), 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
