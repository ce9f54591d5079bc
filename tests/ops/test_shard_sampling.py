"""A vocabulary in shards: the best of the shards' bests is the token drawn from the whole, in the twin and in the kernel."""

import pytest
import torch

from pagecast_kernels import reference, reference_shards, shard_sampling

SIZES = (4096, 2048, 700)


def case(dtype: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Rows that are greedy by temperature or top-k, random, tied, of zeros of both signs, and broken."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, sum(SIZES), generator=generator).mul_(3).to(dtype)
    logits[3, ::5] = 30.0
    logits[4] = 0.0
    logits[4, :5000] = -0.0
    logits[5, 4100] = float("nan")
    logits[6, 6500] = float("inf")
    logits[7] = float("-inf")
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 0.0, 1.0, 0.0, 0.0, 1.3])
    top_k = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    seeds = torch.randint(-(1 << 62), 1 << 62, (9,), generator=generator)
    sequence, positions = torch.arange(9, dtype=torch.int32), torch.arange(100, 109, dtype=torch.int32)
    return logits, (temperature, top_k, seeds, sequence, positions)


@pytest.mark.parametrize("module", [reference_shards, shard_sampling], ids=["twin", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [1, 4], ids=["few", "many"])
def test_the_best_of_the_shards_is_the_token_of_the_whole(module, dtype: torch.dtype, times: int) -> None:
    logits, columns = case(dtype)
    logits = logits.repeat(times, 1)
    temperature, top_k, seeds, sequence, positions = (column.repeat(times) for column in columns)
    none = torch.ones(9 * times), torch.zeros(9 * times)
    expected = reference.sample(logits, temperature, top_k, *none, seeds, sequence, positions)
    start, keys = 0, []
    for shard in logits.split(SIZES, 1):
        keys.append(module.best_of_shard(shard.contiguous(), temperature, top_k, seeds, sequence, positions, start))
        start += shard.shape[1]
    assert reference_shards.tokens_of(torch.stack(keys).amax(0)).tolist() == expected.tolist()
    assert expected[5] == expected[6] == expected[7] == -1 and expected[4] == 0
