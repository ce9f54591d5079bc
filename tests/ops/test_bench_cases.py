"""What the kernel bench puts beside ours computes the same."""

import torch

from pagecast_kernels import bench_cases, bench_quantized, reference, triton_ops


def test_torchs_attention_sees_the_same_keys_and_values(monkeypatch) -> None:
    monkeypatch.setattr(bench_cases, "ROTATE_BYTES", 1)
    pool = bench_cases.Pool.make(12, "cpu", torch.float32)
    case = bench_cases.attention(pool, [40, 40], [40, 40])
    got = bench_cases.sdpa_launches(case, pool)["sdpa"][0]().transpose(1, 2).reshape(80, bench_cases.HEADS, bench_cases.DIM)
    tables = (case.tables[0], case.rows, case.starts, case.lens, bench_cases.DIM**-0.5)
    want = reference.paged_prefill(case.q[0], pool.k, pool.v, *tables, max_query_len=40)
    assert torch.allclose(got, want, atol=1e-4)


def test_it_takes_no_decodes_and_no_ragged_prompts() -> None:
    pool = bench_cases.Pool.make(12, "cpu", torch.float32)
    for lens, query_lens in (([40, 40], [1, 1]), ([40, 17], [40, 17])):
        assert bench_cases.sdpa_launches(bench_cases.attention(pool, lens, query_lens), pool) == {}


def test_the_share_is_of_the_limit_that_binds() -> None:
    pool = bench_cases.Pool.make(12, "cpu", torch.float32)
    decode, prompt = bench_cases.attention(pool, [190]), bench_cases.attention(pool, [190], [190])
    assert bench_cases.share_of_ceiling(decode, 1.0) == decode.kv_bytes / 1e6 / bench_cases.READ_TB_S
    assert bench_cases.share_of_ceiling(prompt, 1.0) == prompt.flops / 1e6 / bench_cases.BF16_TFLOP_S


def test_decodes_over_bytes_are_what_serving_launches(monkeypatch) -> None:
    monkeypatch.setattr(bench_cases, "ROTATE_BYTES", 1)
    pool = bench_cases.Pool.make(12, "cpu", torch.float16)
    case = bench_cases.attention(pool, [40, 7])
    [launch] = bench_quantized.byte_decodes(case, pool)
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (pool.k, pool.v))
    scales = {name: torch.ones(bench_cases.KV_HEADS) for name in ("k_scale", "v_scale")}
    want = reference.paged_decode(case.q[0], k, v, case.tables[0], case.rows, case.lens, bench_cases.DIM**-0.5, **scales)
    assert torch.allclose(launch().float(), want.float(), atol=2e-3)
    assert bench_quantized.paged_decode is triton_ops.paged_decode
