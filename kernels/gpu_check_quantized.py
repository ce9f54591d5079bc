"""Quantized operators on a GPU against float64.

    PYTHONPATH=kernels:tests python kernels/gpu_check_quantized.py [--only NAME]

Products of every kind of packed weight, also of experts, of 8-bit rows, rows that are quantized where they are made, and attention
over a cache of e4m3; mixtures of experts that are not quantized. Each group is a process of its own, as compiling takes longest, and
is told as it ends. Prints what is wrong; exits 1 if anything is.
"""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from gpu_check import report
from ops import paged_case

from pagecast_kernels import configs, decode, experts, prefill, quantized_products, quantized_rows, reference, scaled_products
from pagecast_kernels import quantized_weights as weights
from pagecast_kernels import reference_quantized as twin
from pagecast_kernels.expert_configs import WIDE_EXPERTS, Experts
from pagecast_kernels.quantized_gemv import packed_gemv
from pagecast_kernels.quantized_products import ProductConfig
from pagecast_kernels.routing import Routing

FP8 = torch.float8_e4m3fn


def check_packed(*kinds: weights.Kind) -> Iterator[tuple[str, float]]:
    """Groups, zero points, both 16-bit types, even and odd shapes, pairs, and sums split over programs."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((512, 1024, 1), (320, 576, 33))
    for kind, group, zeros, (rows, columns, count) in itertools.product(kinds, (32, 64, 128, 0), (False, True), shapes):
        if (kind == "fp8" and zeros) or columns % max(group, 1):
            continue
        top, groups = (16 if kind == "int4" else 256), columns // group if group else 1
        values = torch.randint(0, top, (rows, columns), device="cuda", generator=generator).to(torch.uint8)
        if kind == "fp8":
            values = torch.randn(rows, columns, device="cuda", generator=generator).mul(50).clamp(-448, 448).to(FP8).view(torch.uint8)
        scales = torch.rand(rows, groups, device="cuda", generator=generator) * 0.01 + 0.001
        zero = torch.randint(0, top, (rows, groups), device="cuda", generator=generator) if zeros else None
        paired = count == 1 and group == 128
        weight = weights.pack(kind, values, scales, zero, group, paired)
        exact = weights.dequantized(weight, torch.float64)
        name = f"packed {kind} g{group} zeros {zeros} {rows}x{columns}"
        restored = quantized_products.unpack_weight(weight, torch.empty((rows, columns), device="cuda"))
        yield f"unpack {name}", float((restored != weights.dequantized(weight, torch.float32)).any())
        for dtype, splits in itertools.product((torch.bfloat16, torch.float16), (1, 3)):
            x = torch.randn(count, columns, device="cuda", generator=generator).to(dtype)
            want = x.double() @ exact.T
            want = reference.silu_mul(want) if paired else want
            got = quantized_products.packed_product(x, weight, gated=paired, config=ProductConfig(16, 1, splits, 3))
            yield f"{name} {dtype} splits {splits}", paged_case.relative_error(got, want)


def check_head() -> Iterator[tuple[str, float]]:
    """A weight of 8 bits as wide as an output head's, by its own launches and in parts; and one row of it."""
    generator, tiles = torch.Generator(device="cuda").manual_seed(4), quantized_products.WIDE_TILES
    for rows, dtype in itertools.product((64 * tiles, 64 * tiles + 40), (torch.bfloat16, torch.float16)):
        values = torch.randint(0, 256, (rows, 1088), device="cuda", generator=generator).to(torch.uint8)
        weight = weights.pack("int8", values, torch.rand(rows, 1, device="cuda", generator=generator) * 0.01 + 0.001, None, 0)
        exact, unpack = weights.dequantized(weight, torch.float64), quantized_products.unpack_weight
        restored = torch.cat([unpack(part, torch.empty(part.rows, 1088, device="cuda")) for part in weights.in_parts(weight, 1 << 20)])
        yield f"unpack head {rows} in parts", float((restored != weights.dequantized(weight, torch.float32)).any())
        for count in (1, 2, 16, 17, 64, 100, 256, 300):
            x = torch.randn(count, 1088, device="cuda", generator=generator).to(dtype)
            want = x.double() @ exact.T
            yield f"packed head {rows} m{count} {dtype}", paged_case.relative_error(quantized_products.packed_product(x, weight), want)
            if count == 1:
                yield f"packed_gemv head {rows} {dtype}", paged_case.relative_error(packed_gemv(x, weight), want)


def check_scaled() -> Iterator[tuple[str, float]]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    for dtype, count in itertools.product((FP8, torch.int8), (1, 40, 128)):
        x, residual = (torch.randn(count, 1024, device="cuda", generator=generator).bfloat16() for _ in range(2))
        gamma = torch.rand(1024, device="cuda", generator=generator).bfloat16()
        kept, rows = residual.clone(), quantized_rows
        for name, got, want in (
            ("quantize_rows", rows.quantize_rows(x, dtype), twin.quantize_rows(x, dtype)),
            ("silu_mul_quantized", rows.silu_mul_quantized(x, dtype), twin.silu_mul_quantized(x, dtype)),
            ("rms_norm_quantized", rows.rms_norm_quantized(x, gamma, 1e-5, dtype), twin.rms_norm_quantized(x, gamma, 1e-5, dtype)),
            (
                "add_rms_norm_quantized", rows.add_rms_norm_quantized(x, residual, gamma, 1e-5, dtype),
                twin.add_rms_norm_quantized(x, kept, gamma, 1e-5, dtype),
            ),
        ):  # fmt: skip
            meant = [value.float() * scale.unsqueeze(1) for value, scale in (got, want)]
            yield f"{name} {dtype} {count}", paged_case.relative_error(*meant) / 4  # some values fall to the other neighbour
        values, scales = twin.quantize_rows(x, dtype)
        weight, own = twin.quantize_rows(torch.randn(512, 1024, device="cuda", generator=generator), dtype)
        exact = (values.double() @ weight.double().T) * scales.double()[:, None] * own.double()
        for config in (None, ProductConfig(16, 1, 2, 3), ProductConfig(64, 2, 1, 3)):
            got = scaled_products.scaled_product(values, scales, weight, own, dtype=torch.bfloat16, config=config)
            yield f"scaled_product {dtype} {count} {config}", paged_case.relative_error(got, exact)


def check_experts() -> Iterator[tuple[str, float]]:
    """Mixtures of packed and of scaled experts from one token to many, against the twins over the same bits in float64."""
    generator, count, routing = torch.Generator(device="cuda").manual_seed(2), 16, Routing(4)
    random = lambda *shape: torch.randn(shape, device="cuda", generator=generator)
    sizes: tuple[tuple[int, int], ...] = ((512, 256), (576, 320))
    kinds: tuple[tuple[weights.Kind, int, bool, bool], ...] = (
        ("int4", 128, False, False), ("int4", 64, True, False), ("int4", 32, True, True), ("int8", 128, True, False),
        ("fp8", 64, False, False), ("int4", 0, False, False),
    )  # fmt: skip

    def packed(kind: weights.Kind, rows: int, columns: int, group: int, zeros: bool, paired: bool, ordered: bool) -> weights.PackedExperts:
        made, orders, top = [], [], 16 if kind == "int4" else 256
        group = group if not group or columns % group == 0 else 64
        for _ in range(count):
            values = torch.randint(0, top, (rows, columns), device="cuda", generator=generator).to(torch.uint8)
            if kind == "fp8":
                values = random(rows, columns).mul(50).clamp(-448, 448).to(FP8).view(torch.uint8)
            scales = torch.rand(rows, columns // group if group else 1, device="cuda", generator=generator) * 0.01 + 0.001
            zero = torch.randint(0, top, scales.shape, device="cuda", generator=generator) if zeros else None
            made.append(weights.pack(kind, values, scales, zero, group, paired))
            orders.append(torch.randperm(columns, device="cuda", generator=generator) if ordered else None)
        return weights.stacked(made, orders)

    for (hidden, inner), (kind, group, zeros, ordered), tokens in itertools.product(sizes, kinds, (1, 40, 700)):
        first = packed(kind, 2 * inner, hidden, group, zeros, True, ordered)
        second = packed(kind, hidden, inner, group, zeros, False, ordered)
        x, logits = random(tokens, hidden), random(tokens, count)
        for dtype in (torch.bfloat16, torch.float16):
            want = reference.mixture(x.to(dtype).double(), logits.double(), first, second, routing)
            got = experts.mixture(x.to(dtype), logits, first, second, routing)
            name = f"experts {kind} g{group} zeros {zeros} ordered {ordered} {hidden}x{inner} m{tokens} {dtype}"
            yield name, paged_case.relative_error(got, want)
    for dtype, tokens, rows in itertools.product((FP8, torch.int8), (1, 40, 700), (None, 16, 64)):
        first, second = (
            weights.ScaledExperts(values.view(count, n, k), scales.view(count, n))
            for n, k in ((640, 512), (512, 320))
            for values, scales in (twin.quantize_rows(random(count * n, k), dtype),)
        )
        x, logits = random(tokens, 512).bfloat16(), random(tokens, count)
        config = None if rows is None else (Experts(rows, 64, 128, 4, 3),) * 2
        got = experts.mixture(x, logits, first, second, routing, config=config)
        want = reference.mixture(x, logits, first, second, routing)
        yield f"experts scaled {dtype} m{tokens} rows {rows}", paged_case.relative_error(got, want) / 4  # some fall to the other neighbour


def check_mixtures() -> Iterator[tuple[str, float]]:
    """Mixtures of 16-bit experts by the table's launches and by wide ones, evenly chosen and not, sizes that tiles divide and not."""
    generator, count, routing = torch.Generator(device="cuda").manual_seed(3), 16, Routing(4)
    random = lambda *shape: torch.randn(shape, device="cuda", generator=generator)
    wide: list[tuple[Experts, Experts]] = [(first, second) for _, first, second in WIDE_EXPERTS]
    for (hidden, inner), tokens, dtype in itertools.product(((512, 256), (208, 80)), (1, 40, 700, 2500), (torch.bfloat16, torch.float16)):
        first, second = random(count, 2 * inner, hidden).to(dtype) * 0.1, random(count, hidden, inner).to(dtype) * 0.1
        x = random(tokens, hidden).to(dtype)
        for uneven in (False, True):
            logits = random(tokens, count) + uneven * 3.0 * torch.arange(count, device="cuda") ** 0.5
            want = reference.mixture(x.double(), logits.double(), first.double(), second.double(), routing)
            for launch in (None, *(wide if configs.is_hopper(x.device) else ())):
                got = experts.mixture(x, logits, first, second, routing, config=launch)
                yield f"experts {hidden}x{inner} m{tokens} {dtype} uneven {uneven} {launch}", paged_case.relative_error(got, want)


def check_cache() -> Iterator[tuple[str, float]]:
    lens, chunks = [1, 17, 0, 64, 900, 4000, *range(300, 340)], [900, 1, 64, 100]
    for heads, kv_heads, dim, size in ((32, 8, 128, 16), (9, 3, 64, 32), (8, 2, 96, 16)):
        for lengths, queries in ((lens, [1] * len(lens)), ([900, 5, 64, 333], chunks)):
            case = paged_case.make(dim, lengths, queries, heads, kv_heads, dim, size, torch.bfloat16, "cuda")
            scale = {f"{part}_scale": torch.rand(kv_heads, device="cuda") * 0.02 + 0.01 for part in "kv"}
            k, v = (
                (cache.float() / own.view(1, -1, 1, 1)).clamp(-448, 448).to(FP8)
                for cache, own in zip((case.k_cache, case.v_cache), scale.values(), strict=True)
            )
            q, name = case.q.double(), f"{heads}/{kv_heads} d{dim} page{size}"
            if queries is chunks:
                args = (k, v, case.block_table, case.rows, case.starts, case.seq_lens, dim**-0.5)
                got = prefill.paged_prefill(case.q, *args, max_query_len=900, **scale)
                yield f"prefill {name}", paged_case.relative_error(got, reference.paged_prefill(q, *args, max_query_len=900, **scale))
            else:
                args = (k, v, case.block_table, case.rows, case.seq_lens, dim**-0.5)
                got = decode.paged_decode(case.q, *args, **scale)
                yield f"decode {name}", paged_case.relative_error(got, reference.paged_decode(q, *args, **scale))


CHECKS: dict[str, tuple[Callable[[], Iterator[tuple[str, float]]], float]] = {
    "int4": (lambda: check_packed("int4"), 4e-3), "int8": (lambda: check_packed("int8"), 4e-3), "fp8": (lambda: check_packed("fp8"), 4e-3),
    "head": (check_head, 4e-3), "scaled": (check_scaled, 6e-3), "experts": (check_experts, 8e-3), "mixtures": (check_mixtures, 8e-3),
    "cache": (check_cache, 8e-3),
}  # fmt: skip
"""Groups of checks, and the largest relative error of each."""


def check_group(name: str) -> tuple[int, str]:
    """(exit status, what it said) of a process that makes one group's checks."""
    done = subprocess.run([sys.executable, __file__, "--only", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKS, help="one group, in this process")
    if only := parser.parse_args().only:
        check, limit = CHECKS[only]
        return int(bool(report([(check(), limit)])))
    wrong = 0
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        running = {pool.submit(check_group, name): name for name in CHECKS}
        for future in as_completed(running):
            status, said = future.result()
            wrong |= status
            print(f"== {running[future]}: {'right' if status == 0 else f'ended with {status}'}", said.rstrip(), sep="\n", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
