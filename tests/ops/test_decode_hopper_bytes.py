"""The warp-specialised decode over a cache of e4m3: which cases go to it; its conversions and its order of lanes, without a GPU.

Its numbers are checked on a Hopper GPU with those of decode_hopper (test_decode_hopper).
"""

import re

import pytest
import torch
from ops import paged_case

pytest.importorskip("triton.experimental.gluon")

from pagecast_kernels import configs, decode_flat, decode_hopper_bytes, reference
from pagecast_kernels.decode_bytes import SPLIT

FP8 = torch.float8_e4m3fn


def converted(asm: str, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both outputs, float16 [n, 2], of a piece of PTX over registers of two 16-bit words, uint8 [n, 4]."""
    held: dict[str, torch.Tensor] = {"$2": words}
    for line in re.findall(r"^(?!\.)(\S.*);$", asm.strip("{}\n "), re.M):
        name, *operands = re.findall(r"\{\w+, \w+\}|[\w.$]+", line)
        if name == "prmt.b32":
            into, low, high, chosen = operands
            bytes_ = torch.cat((held[low], held[high]), 1)
            held[into] = torch.stack([bytes_[:, int(chosen, 16) >> 4 * n & 7] for n in range(4)], 1)
        elif name == "mov.b32":
            first, second = operands[0].strip("{}").split(", ")
            held[first], held[second] = held[operands[1]][:, :2], held[operands[1]][:, 2:]
        else:
            assert name == "cvt.rn.f16x2.e4m3x2"
            held[operands[0]] = held[operands[1]].contiguous().view(FP8).to(torch.float16)
    return held["$0"], held["$1"]


def random_bytes(*shape: int) -> torch.Tensor:
    """Any e4m3, NaN excepted."""
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return values.where(values & 127 != 127, 0)


def test_registers_of_two_words_become_even_and_odd_lanes() -> None:
    """Word 0 of a register holds lanes 0 and 1 of a token, word 1 those of the next."""
    words = random_bytes(400, 4)
    want = words.view(FP8).to(torch.float16)
    even, odd = converted(SPLIT.value, words)
    assert torch.equal(even, want[:, ::2]) and torch.equal(odd, want[:, 1::2])


def test_scores_of_words_are_those_of_lanes() -> None:
    """Keys as the two products take them, times queries in the order in which they are read for either: q · k."""
    keys, q = random_bytes(64, 128), torch.randn((8, 128), generator=torch.Generator().manual_seed(8)).double()
    parts = converted(decode_hopper_bytes._PAIRS.value, keys.view(64 * 32, 4))
    lanes = [decode_hopper_bytes.lane_of.fn(torch.arange(64), part) for part in range(2)]
    assert sorted(torch.cat(lanes).tolist()) == list(range(128))
    got = sum(part.double().view(64, 64) @ q[:, lane].t() for part, lane in zip(parts, lanes))
    torch.testing.assert_close(got, keys.view(FP8).double() @ q.t())


def cached(heads: int = 8, dim: int = 128, size: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((3, heads, dim), dtype=dtype), torch.zeros((4, 2, size, dim)).to(FP8)


@pytest.mark.parametrize("shape", [{}, {"heads": 32}, {"heads": 2}, {"size": 32}, {"size": 128}, {"dtype": torch.float16}])
def test_what_suits(shape: dict) -> None:
    assert decode_hopper_bytes.suits(*cached(**shape))


@pytest.mark.parametrize("shape", [{"heads": 64}, {"dim": 64}, {"dim": 256}, {"size": 8}, {"size": 256}, {"dtype": torch.float32}])
def test_what_does_not(shape: dict) -> None:
    assert not decode_hopper_bytes.suits(*cached(**shape))


def test_a_window_a_soft_cap_or_another_cache_does_not_suit() -> None:
    q, cache = cached()
    assert not decode_hopper_bytes.suits(q, cache, window=100)
    assert not decode_hopper_bytes.suits(q, cache, softcap=30.0)
    assert not decode_hopper_bytes.suits(q, cache.to(torch.bfloat16))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sequences are shared by head, few are not, and what would spill stays with the other kernel."""
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    of = decode_hopper_bytes.config_for
    for batch, kv_heads, programs in ((9, 8, 512), (64, 8, 512), (256, 8, 512), (1000, 3, 510)):
        many = of(batch, kv_heads, 4, "cpu")
        assert many and many.by_head and many.programs == programs
    few = of(8, 8, 16, "cpu")
    assert few and not few.by_head and few.programs == 256
    assert of(256, 8, 16, "cpu") is None


def test_a_hopper_gpu_takes_what_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own list of tiles; everything else stays where it was, on the same workspace."""
    calls: list[tuple] = []
    monkeypatch.setattr(decode_hopper_bytes, "launch", lambda *args: calls.append((args[7], args[10])) or args[9])
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    case = paged_case.make(1, [5, 0, 300], [1] * 3, 4, 2, 128, 16, torch.float16)
    caches, scales = (case.k_cache.to(FP8), case.v_cache.to(FP8)), (torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25]))
    tables, work = (case.block_table, case.rows, case.seq_lens, 0.1), decode_flat.step_workspace(40, 4, 2, 128, "cpu")
    attend = lambda **looks: decode_flat.paged_decode(
        case.q, *caches, *tables, workspace=work, out=torch.full_like(case.q, float("nan")), k_scale=scales[0], v_scale=scales[1], **looks
    )
    attend()
    ((tiles, config),) = calls
    assert tiles.tile == config.tile == 128
    assert tiles.tiles[: tiles.count.item()].tolist() == [[0, 0, 1, 5], [2, 1, 3, 300], [2, 1, 3, 172], [2, 1, 3, 44]]
    wide = [cache.double() * scale.double()[None, :, None, None] for cache, scale in zip(caches, scales)]
    for looks in ({"softcap": 20.0}, {"window": 8}):
        want = reference.paged_decode(case.q.double(), *wide, *tables, **looks)
        assert paged_case.relative_error(attend(**looks), want) < 5e-3
    assert len(calls) == 1
