"""`pagecast bench kernels`: kernels on this machine's GPU, in CUDA graphs over rotating inputs, beside FlashAttention 3 where it is."""

import argparse
import sys
from typing import Any

_ATTENTION = {
    "decode": ["1x1024", "1x4096", "1x32768", "8x1024", "8x4096", "16x32768", "64x1024", "64x4096", "256x1024", "256x4096"],
    "prefill": ["1x2048", "4x2048", "1x8192", "1x32768"],
}
_SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "plain": {}, "top_k_top_p": {"top_k": 50, "top_p": 0.9}, "top_p": {"top_p": 0.9},
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default="benchmarks/results", help="folder for the result file")
    every = "decode,prefill,mixed,shared,sample,products,quantized,experts,latent"
    parser.add_argument("--parts", default=every, help="what to measure, separated by commas")


def lengths(shape: str) -> list[int]:
    """[4096, 4096] of "2x4096"."""
    count, length = shape.split("x")
    return [int(length)] * int(count)


def attention_metrics(cases: Any, parts: set[str]) -> dict[str, float]:
    """Microseconds, TB/s or TFLOP/s, and FlashAttention 3's time over ours, of decode, prefill and mixed batches."""
    pool = cases.Pool.make(66_000)
    found: dict[str, float] = {}
    shapes: dict[str, tuple[list[int], list[int] | None]] = {f"decode.{name}": (lengths(name), None) for name in _ATTENTION["decode"]}
    shapes |= {f"decode.ragged{count}": (cases.ragged(count), None) for count in (64, 256)}
    shapes |= {f"prefill.{name}": (lengths(name), lengths(name)) for name in _ATTENTION["prefill"]}
    shapes["mixed.64x1024+2048"] = ([1024] * 64 + [2048], [1] * 64 + [2048])
    for name, (lens, query_lens) in shapes.items():
        kind = name.split(".")[0]
        if kind not in parts:
            continue
        case = cases.attention(pool, lens, query_lens)
        ours = {"decode": case.decode, "prefill": case.prefill}.get(kind) or (lambda pool: cases.mixed(pool, [1024] * 64, [2048]))
        timed = cases.alternate({"ours": ours(pool)} | cases.flash3_launches(case, pool), rounds=3)
        found[f"kernels.{name}.us"] = timed["ours"]
        found[f"kernels.{name}.tb_s"] = case.kv_bytes / timed["ours"] / 1e6
        found[f"kernels.{name}.tflop_s"] = case.flops / timed["ours"] / 1e6
        rivals = [us for label, us in timed.items() if label != "ours"]
        if rivals:
            found[f"kernels.{name}.ratio_fa3"] = min(rivals) / timed["ours"]
        print(f"{name:24} {timed['ours']:9.1f} us", *(f"{label} {us:.1f} us" for label, us in timed.items() if label != "ours"), flush=True)
    if "shared" in parts:
        timed = cases.alternate(cases.shared_prefix(pool), rounds=3)
        found |= {"kernels.shared_prefix.us": timed["shared"], "kernels.shared_prefix.ratio_plain": timed["plain"] / timed["shared"]}
        print(f"256 x (2048 shared + 64): {timed['shared']:.1f} us, without sharing {timed['plain']:.1f} us", flush=True)
    return found


def run(args: argparse.Namespace) -> int:
    import torch

    from pagecast.bench import results

    if not torch.cuda.is_available():
        print("pagecast bench kernels: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    from pagecast_kernels import bench_cases, bench_products

    parts = set(args.parts.split(","))
    metrics = attention_metrics(bench_cases, parts)
    for name, limits in _SAMPLING.items() if "sample" in parts else ():
        launches = bench_cases.sampling_launches(256, 128256, limits, filtered=bool(set(limits) - {"temperature"}))
        metrics[f"kernels.sample.{name}.us"] = bench_cases.graph_us(launches)
        print(f"sample {name:17} {metrics[f'kernels.sample.{name}.us']:9.1f} us", flush=True)
    if "products" in parts:
        metrics |= bench_products.measure()
    if parts & {"experts", "latent"}:
        from pagecast_kernels import bench_models

        metrics |= bench_models.measure_experts() if "experts" in parts else {}
        metrics |= bench_models.measure_latent() if "latent" in parts else {}
    if "quantized" in parts:
        from pagecast_kernels import bench_quantized

        metrics |= bench_quantized.measure()
    print(results.write(args.results, "kernels", metrics, {}))
    return 0
