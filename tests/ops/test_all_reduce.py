"""Sums over ranks in the interpreter. Ranks run one after the other here, so what the peers would write is there before a rank begins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagecast_kernels import reference
from pagecast_kernels.all_reduce import _FLAGS_BYTES, all_reduce, all_reduce_add_rms_norm, peers_over, shared_bytes

WIDTH, PLACES = 4096, 8


class Group:
    """The shared memory of n ranks, which are all in this process."""

    def __init__(self, ranks: int) -> None:
        self.memory = [torch.zeros(shared_bytes(WIDTH, PLACES, 2), dtype=torch.uint8) for _ in range(ranks)]
        self.peers = [peers_over([m.data_ptr() for m in self.memory], rank, WIDTH, PLACES, "cpu") for rank in range(ranks)]
        self.calls = 0

    def publish(self, summands: list[torch.Tensor], width: int, sums: list[torch.Tensor] | None = None) -> None:
        """Every rank's data and flags of the next call, as if each had come as far as the exchange."""
        self.calls += 1
        programs = -(-summands[0].numel() // width)
        for memory, summand in zip(self.memory, summands):
            data = memory[_FLAGS_BYTES:].view(torch.float16)
            memory[:_FLAGS_BYTES].view(torch.int32).fill_(self.calls)
            for program, part in enumerate(summand.flatten().split(width)):
                start = ((self.calls & 1) * PLACES + program) * WIDTH
                data[start : start + len(part)] = part
        for rank, (memory, part) in enumerate(zip(self.memory, sums or [])):
            data = memory[_FLAGS_BYTES:].view(torch.float16)
            for program in range(programs):
                share = width // len(self.memory)
                start = (2 * PLACES + program) * WIDTH + rank * share
                own = part.flatten()[program * width + rank * share :][:share]
                data[start : start + len(own)] = own


def made(ranks: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(shape, generator=generator).half() for _ in range(ranks)]


@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize(("ranks", "count"), [(2, 3000), (4, 1024), (2, 1)])
def test_every_rank_gets_the_sum_call_after_call(ranks: int, count: int, two_shots: bool) -> None:
    group = Group(ranks)
    for turn in range(3):
        summands = [part * (turn + 1) for part in made(ranks, count)]
        total = torch.stack(summands).float().sum(0).half()
        results = []
        for rank in range(ranks):
            group.calls = turn
            group.publish(summands, 1024, [total] * ranks if two_shots else None)
            results.append(all_reduce(summands[rank].clone(), group.peers[rank], two_shots=two_shots))
        assert all(torch.equal(result, total) for result in results)
        assert group.peers[0].counters[0] == turn + 1


def test_the_sum_may_go_into_a_residual() -> None:
    group, summands, residual = Group(2), made(2, 1, 2000), made(3, 1, 2000)[2]
    expected = (torch.stack(summands).float().sum(0) + residual.float()).half()
    group.publish(summands, 1024)
    assert torch.equal(all_reduce(summands[1].clone(), group.peers[1], residual.clone()), expected)


@pytest.mark.parametrize("hidden", [576, 1024])
def test_residual_and_norm_in_the_same_launch(hidden: int) -> None:
    group, summands = Group(2), made(2, 5, hidden)
    residual, weight = made(3, 5, hidden)[2], made(3, hidden)[0]
    for rank in range(2):
        group.calls = 0
        group.publish(summands, hidden)
        own = residual.clone()
        got = all_reduce_add_rms_norm(summands[rank].clone(), own, weight, 1e-5, group.peers[rank])
        wide = residual.double()
        want = reference.add_rms_norm(torch.stack(summands).double().sum(0), wide, weight.double(), 1e-5)
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(own.double(), wide, rtol=1e-3, atol=1e-3)


RANK = """
import mmap, sys, ctypes, torch
from pagecast_kernels.all_reduce import all_reduce, peers_over, shared_bytes
rank, ranks, width, places = int(sys.argv[1]), int(sys.argv[2]), 4096, 8
maps = []
for path in sys.argv[3:]:
    with open(path, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), shared_bytes(width, places, 2)))
addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in maps]
peers = peers_over(addresses, rank, width, places, "cpu")
generator = torch.Generator().manual_seed(5)
for call in range(8):
    count = (1500, 5000, 70000 // 64)[call % 3]
    summands = [torch.randn(1, count, generator=generator).half() for _ in range(ranks)]
    total = torch.stack(summands).float().sum(0)
    got = all_reduce(summands[rank].clone(), peers, two_shots=call % 2 == 1)
    assert torch.equal(got, total.half()), call
    residual = torch.ones_like(total).half()
    got = all_reduce(summands[rank].clone(), peers, residual, two_shots=False)
    assert torch.allclose(got.float(), total + 1, atol=2e-2), call
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_run_at_the_same_time_wait_for_each_other(tmp_path: Path, ranks: int) -> None:
    """Real processes over shared memory: flags, slots that are written again, and exchanges in both directions, call after call."""
    paths = [tmp_path / f"rank-{rank}" for rank in range(ranks)]
    for path in paths:
        path.write_bytes(bytes(shared_bytes(WIDTH, PLACES, 2)))
    command = [sys.executable, "-c", RANK]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), *map(str, paths)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
