"""Rows that begin with the same blocks: who is found to share, and that reading their prefix once gives the same tokens."""

import os
from functools import partial

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from worker.tiny_model import write_model

from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.sampling import SamplingParams
from pagecast_worker import graphs, sharing
from pagecast_worker.backend import cuda_operators
from pagecast_worker.config import WorkerConfig
from pagecast_worker.graphs import DecodeGraphs
from pagecast_worker.row_book import RowBook
from pagecast_worker.sharing import PrefixSharing
from pagecast_worker.steps import decode_step
from pagecast_worker.torch_executor import TorchExecutor

BLOCKS = 120
PROMPT = [(13 * i) % 500 + 3 for i in range(48)]


def admission(row: int, tokens: list[int], blocks: list[int], computed: int) -> Admission:
    return Admission(
        row=row, tokens=pack_u32(tokens), num_prompt_tokens=len(tokens), blocks=pack_u32(blocks), num_computed_tokens=computed,
        max_tokens=200, min_tokens=0, stop_token_ids=b"", sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip


def admit(book: RowBook, row: int, blocks: list[int], tokens: int) -> None:
    book.apply(StepPlan(1, 1, admissions=(admission(row, [5] * tokens, blocks, 0),)))


def book_of(tables: list[tuple[list[int], int]]) -> RowBook:
    book = RowBook(StartEpoch(1, BLOCKS, 16, 32, 256, 2048), 16)
    for row, (blocks, tokens) in enumerate(tables):
        admit(book, row, blocks, tokens)
    return book


def test_groups_are_found_with_the_blocks_that_all_members_have(monkeypatch):
    monkeypatch.setattr(sharing, "WORTHWHILE_BYTES", 1)
    first = [([1, 2, 3, 10 + n], 60) for n in range(3)] + [([1, 2, 9, 14], 60), ([1, 2, 3], 33)]
    second = [([50, 60 + n], 32) for n in range(4)]
    lonely = [([80], 16), ([81], 10)]
    book = book_of([*first, *second, *lonely])
    found = PrefixSharing(3, 1).of(book, np.arange(11))
    assert found.skip.tolist() == [32] * 5 + [16] * 4 + [0, 0]
    assert found.items.tolist() == [[0, 3, 32, 0], [3, 2, 32, 0], [5, 3, 16, 5], [8, 1, 16, 5]]
    assert found.members.tolist() == list(range(9))


def test_a_row_keeps_a_token_of_its_own_and_little_is_not_worth_it(monkeypatch):
    book = book_of([([1, 2], 32)] * 4)
    assert PrefixSharing(8, 1).of(book, np.arange(4)) is None
    monkeypatch.setattr(sharing, "WORTHWHILE_BYTES", 1)
    rows = np.arange(4)
    assert PrefixSharing(8, 1).of(book, rows).skip.tolist() == [16] * 4
    assert PrefixSharing(8, 1).of(book, rows[:3]) is None


def test_the_answer_is_new_after_an_admission(monkeypatch):
    monkeypatch.setattr(sharing, "WORTHWHILE_BYTES", 1)
    book, finder = book_of([([1, 2], 40)] * 4), PrefixSharing(8, 1)
    assert finder.of(book, np.arange(4)) is finder.of(book, np.arange(4))
    book.apply(StepPlan(1, 2, released=pack_u32([3])))
    admit(book, 3, [7, 8], 40)
    assert finder.of(book, np.arange(4)) is None


def test_the_answer_is_new_in_an_epoch_that_admits_the_same_rows(monkeypatch):
    """A scheduler that comes back may give the same rows other blocks, after as many admissions."""
    monkeypatch.setattr(sharing, "WORTHWHILE_BYTES", 1)
    finder, rows = PrefixSharing(8, 1), np.arange(4)
    assert finder.of(book_of([([1, 2, 3, 4 + n], 64) for n in range(4)]), rows).skip.tolist() == [48] * 4
    assert finder.of(book_of([([1, 2 + n, 6 + n, 10 + n], 64) for n in range(4)]), rows).skip.tolist() == [16] * 4


class Here(DecodeGraphs):
    """Graphs without CUDA. shared: how many replays read a prefix once."""

    shared = 0

    def _replay(self, size, shares):
        self.shared += shares
        return self._run(size, shares)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    config = WorkerConfig(run_dir="/unused", model=str(folder), device="cpu", dtype="float32", num_blocks=BLOCKS, max_num_seqs=8)
    made = TorchExecutor(config)
    made.load(lambda progress: None)
    return made


def outputs(executor: TorchExecutor, steps: int) -> list[list[int]]:
    """Six rows on one prefix of two blocks, of which the first computed it; then everybody decodes."""
    executor.start_epoch(StartEpoch(1, BLOCKS, 16, 8, 256, 2048))
    first = admission(0, PROMPT, [1, 2, 3, 4, 5], 0)
    others = tuple(
        admission(row, [*PROMPT[:32], *range(3 + row, 11 + 2 * row)], [1, 2, *range(10 * row, 10 * row + 3)], 32) for row in range(1, 6)
    )
    lengths = [8 + row for row in range(1, 6)]
    rows = list(range(1, 6))
    plans = [
        StepPlan(1, 1, admissions=(first,), chunk_rows=pack_u32([0]), chunk_starts=pack_u32([0]), chunk_lengths=pack_u32([48])),
        StepPlan(
            1, 2, admissions=others, chunk_rows=pack_u32(rows), chunk_starts=pack_u32([32] * 5), chunk_lengths=pack_u32(lengths),
            paused=pack_u32([0]),
        ),
        *(StepPlan(1, 3 + n) for n in range(steps)),
    ]  # fmt: skip
    found = []
    for plan in plans:
        executor.submit(plan)
        found.append(view_u32(executor.collect(wait=True).tokens).tolist())
    return found


def test_a_prefix_read_once_gives_the_same_tokens(executor, monkeypatch):
    expected = outputs(executor, 4)
    monkeypatch.setattr(sharing, "WORTHWHILE_BYTES", 1)
    monkeypatch.setattr(graphs, "SMALLEST_BATCH", 4)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    finder = sharing.sharing_for(executor.model, torch.float32)
    made = Here(partial(decode_step, executor), [1, 2, 4, 8], executor.state.padding, torch.device("cpu"), finder)
    monkeypatch.setattr(executor, "_graphs", made)
    assert outputs(executor, 4) == expected
    assert made.shared == 4
