"""A model split over two ranks: the ranks' parts add up to, or join into, what one rank computes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from worker.smollm2 import model_file
from worker.tiny_model import write_config, write_model

from pagecast_worker import cpu_ops
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.loading.gguf import GgufCheckpoint
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.loading.load import check_split, load_model, open_checkpoint
from pagecast_worker.parallel import ByTorch, Mute, Ranks

CPU = torch.device("cpu")


def load(folder, size, rank):
    config = WorkerConfig(run_dir="/unused", model=str(folder), tensor_parallel_size=size, rank=rank, device="cpu")
    return load_model(config, open_checkpoint(config, CPU), Ranks(rank, size, Mute()), CPU, torch.float32, lambda progress: None).model


@pytest.fixture
def models(tmp_path):
    """The whole model and its two halves, whose collectives leave partial results as they are."""
    folder = write_model(tmp_path)
    return load(folder, 1, 0), [load(folder, 2, rank) for rank in range(2)]


def test_parts_add_up(models):
    whole, halves = models
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 255, 256, 511, 7], dtype=torch.int32)

    def same(compute, join):
        torch.testing.assert_close(join([compute(half) for half in halves]), compute(whole), rtol=1e-5, atol=1e-5)

    same(lambda model: model.layers[1].feed_forward.forward(cpu_ops, x), sum)
    same(lambda model: model.embedding.forward(cpu_ops, ids), sum)
    same(lambda model: model.head.local(cpu_ops, x), lambda parts: torch.cat(parts, -1))
    assert {half.layers[0].attention.qkv.weight.shape for half in halves} == {torch.Size([128, 128])}


def test_attention_of_both_ranks_adds_up(models):
    whole, halves = models
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    step = StepInputs(
        token_ids=torch.zeros(6, dtype=torch.int32), positions=torch.arange(6, dtype=torch.int32), slot_mapping=torch.arange(16, 22),
        block_table=torch.tensor([[1]], dtype=torch.int32), num_decodes=0, decode_rows=torch.zeros(0, dtype=torch.int32),
        decode_seq_lens=torch.zeros(0, dtype=torch.int32), num_prefills=1, prefill_rows=torch.tensor([0], dtype=torch.int32),
        prefill_seq_lens=torch.tensor([6], dtype=torch.int32), query_start_loc=torch.tensor([0, 6], dtype=torch.int32), max_query_len=6,
    )

    def attend(model):
        k_cache, v_cache = (torch.zeros(2, model.num_kv_heads, 16, 32) for _ in range(2))
        return model.layers[0].attention.forward(cpu_ops, x, step, k_cache, v_cache)

    torch.testing.assert_close(attend(halves[0]) + attend(halves[1]), attend(whole), rtol=1e-5, atol=1e-5)


def test_kv_heads_are_replicated_where_ranks_exceed_them(tmp_path):
    whole = load(write_model(tmp_path), 1, 0).layers[0].attention.qkv.weight
    quarters = [load(tmp_path, 4, rank) for rank in range(4)]
    assert {(model.num_kv_heads, model.layers[0].attention.num_heads) for model in quarters} == {(1, 1)}
    for rank, model in enumerate(quarters):  # 4 query heads, then 2 key and 2 value heads, of 32 rows each
        heads = [rank, 4 + rank // 2, 6 + rank // 2]
        expected = torch.cat([whole[32 * head : 32 * head + 32] for head in heads])
        assert torch.equal(model.layers[0].attention.qkv.weight, expected)


def test_a_vocabulary_that_does_not_divide_leaves_the_last_rank_fewer():
    parts = [Ranks(rank, 3).vocabulary(100) for rank in range(3)]
    assert [(part.start, part.stop) for part in parts] == [(0, 48), (48, 96), (96, 100)]
    with pytest.raises(LoadError, match="too large for vocab_size 30, got 3"):
        Ranks(0, 3).vocabulary(30)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "must divide num_key_value_heads or be a multiple of it, got 3 for 4"),
        (8, r"must divide num_attention_heads, got 8 for 12 \(1, 2, 3, 4, 6, 12 would\)"),
    ],
)
def test_heads_that_do_not_divide_are_refused(tmp_path, size, message):
    config, _ = read_config(write_config(tmp_path, num_attention_heads=12, num_key_value_heads=4))
    with pytest.raises(LoadError, match=f"tensor_parallel_size {message}"):
        check_split(config, Ranks(0, size))


def test_a_bias_is_added_once():
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    halves = [RowParallel(part.contiguous(), Ranks(rank, 2), bias) for rank, part in enumerate(weight.chunk(2, 1))]
    summed = sum(half.forward(cpu_ops, x_half) for half, x_half in zip(halves, x.chunk(2, 1), strict=True))
    torch.testing.assert_close(summed, ColumnParallel(weight, bias).forward(cpu_ops, x))


@pytest.mark.parametrize("size", [2, 4])
def test_the_real_models_nine_heads_are_refused(size):
    with pytest.raises(LoadError, match=f"tensor_parallel_size must divide num_attention_heads, got {size} for 9"):
        check_split(GgufCheckpoint(model_file()).config, Ranks(0, size))


def test_collectives_are_called_by_the_names_that_this_torch_knows():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            here, held = ByTorch(CPU), torch.arange(6.0).view(2, 3)
            assert here.all_gather(held, 1).equal(held[None]) and here.all_reduce(held.clone()).equal(held)
    finally:
        dist.destroy_process_group()
