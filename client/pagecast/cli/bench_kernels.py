"""`pagecast bench kernels`: kernels on this machine's GPU, in CUDA graphs over rotating inputs, beside FlashAttention 3 where it is."""

import argparse
import sys
from datetime import UTC, datetime
from typing import Any

from pagecast.cli.quantities import COUNT, Names

_ATTENTION = {
    "decode": ["1x1024", "1x4096", "1x32768", "8x1024", "8x4096", "16x32768", "64x1024", "64x4096", "256x1024", "256x4096"],
    "prefill": ["1x2048", "4x2048", "1x8192", "1x32768"],
}
_SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "plain": {}, "top_k_top_p": {"top_k": 50, "top_p": 0.9}, "top_p": {"top_p": 0.9},
}  # fmt: skip


PARTS = ("decode", "prefill", "mixed", "shared", "sample", "products", "quantized", "experts", "latent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")
    parser.add_argument("--parts", type=Names(PARTS), default=",".join(PARTS), help="what to measure, separated by commas (default: all)")
    parser.add_argument(
        "--tune", nargs="+", metavar="SHAPE",
        help="instead, find the best cuBLASLt algorithm, or launch of our own, for every product of these models (shapes of "
        "`bench throughput`) and write the table that serving reads",
    )  # fmt: skip
    parser.add_argument("--tune-rows", type=numbers, metavar="N,N", help="rows to tune for (default: those of serving's graphs, and more)")
    parser.add_argument(
        "--exhaustive", action="store_true",
        help="with --tune: up to 1,024 rows time everything that the library's algorithms can be set to, not only what promises most",
    )  # fmt: skip
    parser.add_argument(
        "--in-step", action="store_true",
        help="with --tune: of what is fastest alone take what is fastest together, in decode steps on a hot chip; some 15 s more for each "
        "number of up to 256 rows",
    )  # fmt: skip
    parser.add_argument(
        "--gated", action="store_true",
        help="with --tune: only find out which gate and up products take one launch with SiLU·mul, beside the table's products",
    )  # fmt: skip
    parser.add_argument("--tensor-parallel-size", type=COUNT, default=1, metavar="N", help="tune for one rank of N (default: %(default)s)")


def numbers(text: str) -> list[int]:
    """[16, 64] of "16,64"."""
    return [COUNT(part) for part in text.split(",")]


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
        peers = cases.flash3_launches(case, pool) | cases.sdpa_launches(case, pool)
        timed = cases.alternate({"ours": ours(pool)} | peers, rounds=3)
        found[f"kernels.{name}.us"] = timed["ours"]
        found[f"kernels.{name}.tb_s"] = case.kv_bytes / timed["ours"] / 1e6
        found[f"kernels.{name}.tflop_s"] = case.flops / timed["ours"] / 1e6
        found[f"kernels.{name}.share"] = cases.share_of_ceiling(case, timed["ours"])
        for peer in ("fa3", "sdpa"):
            rivals = [us for label, us in timed.items() if label.startswith(peer)]
            if rivals:
                found[f"kernels.{name}.ratio_{peer}"] = min(rivals) / timed["ours"]
        others = (f"{label} {us:.1f} us" for label, us in timed.items() if label != "ours")
        print(f"{name:24} {timed['ours']:9.1f} us, {found[f'kernels.{name}.share']:.2f} of the ceiling", *others, flush=True)
    if "shared" in parts:
        timed = cases.alternate(cases.shared_prefix(pool), rounds=3)
        found |= {"kernels.shared_prefix.us": timed["shared"], "kernels.shared_prefix.ratio_plain": timed["plain"] / timed["shared"]}
        print(f"256 x (2048 shared + 64): {timed['shared']:.1f} us, without sharing {timed['plain']:.1f} us", flush=True)
    return found


def products_of(config: dict[str, Any], ranks: int = 1) -> list[tuple[int, int]]:
    """[columns, depth] of the weights of one rank: query, key and value; output; gate and up; down; and last the head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = config.get("head_dim", hidden // heads), max(config["num_key_value_heads"] // ranks, 1)
    queries, inner = heads * head_dim // ranks, config["intermediate_size"] // ranks
    head = -(-config["vocab_size"] // ranks)
    return [(queries + 2 * kv_heads * head_dim, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner), (head, hidden)]


def kv_bytes_of(config: dict[str, Any], ranks: int = 1) -> int:
    """That one rank's cache holds of a token in a layer, bf16."""
    head_dim: int = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv_heads: int = config["num_key_value_heads"]
    return 2 * max(kv_heads // ranks, 1) * head_dim * 2


def tune(args: argparse.Namespace) -> int:
    """Measure every product of the named models and write the table of this GPU."""
    from pagecast.bench import model_shapes, results
    from pagecast_kernels import cublaslt, tune_gated, tune_in_step, tune_products

    unknown = [name for name in args.tune if name not in model_shapes.SHAPES]
    if unknown:
        print(f"pagecast bench kernels: --tune {unknown[0]}: not one of {', '.join(model_shapes.SHAPES)}", file=sys.stderr)
        return 2
    products = [products_of(model_shapes.SHAPES[name], args.tensor_parallel_size) for name in args.tune]
    rows = args.tune_rows or [*tune_products.DECODE_ROWS, *tune_products.MIXED_ROWS]
    shapes = [] if args.gated else list(dict.fromkeys(shape for model in products for shape in model))
    try:
        lib, found = tune_products.tune(shapes, rows, only_decode=[model[-1] for model in products], exhaustive=args.exhaustive)
        metrics = tune_products.metrics(found)
        for name, model in zip(args.tune, products) if args.in_step and not args.gated else ():
            kv_bytes = kv_bytes_of(model_shapes.SHAPES[name], args.tensor_parallel_size)
            for count, together in tune_in_step.tune(lib, model[:-1], found, kv_bytes).items():
                metrics[f"kernels.tune.{name}.M{count}.ratio"] = together.before_us / together.us
        note = results.provenance(datetime.now(UTC))
        tune_products.write_table(lib.version, tune_products.products_json(found), note)  # which the gated ones are compared with
        gated = tune_gated.tune(dict.fromkeys(model[2] for model in products), rows)
    except (OSError, cublaslt.BlasError) as error:
        print(f"pagecast bench kernels: {error}", file=sys.stderr)
        return 1
    print(results.write(args.results, "tune", metrics | tune_gated.metrics(gated), {}))
    print(tune_products.write_table(lib.version, {}, note, tune_gated.gated_json(gated)))
    return 0


def run(args: argparse.Namespace) -> int:
    from pagecast.bench import results
    from pagecast_kernels import bench_cases

    how = {"--exhaustive": args.exhaustive, "--in-step": args.in_step, "--gated": args.gated, "--tune-rows": args.tune_rows}
    if not args.tune and (given := [name for name, value in how.items() if value]):
        print(f"pagecast bench kernels: {given[0]}: says how to tune, which --tune asks for", file=sys.stderr)
        return 2
    if not bench_cases.has_gpu():
        print("pagecast bench kernels: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    if args.tune:
        return tune(args)
    results.check_folder(args.results)
    from pagecast_kernels import bench_products

    parts = args.parts
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
