"""What `pagecast bench kernels` measures of the operators that some families alone need: mixtures of experts, latent attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, configs, expert_configs, experts, latent
from pagecast_kernels.decode_flat import StepTiles, StepWorkspace
from pagecast_kernels.routing import Routing

COUNT, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768  # Qwen3-30B-A3B
HEADS, RANK, ROPE, BLOCK_SIZE = 16, 512, 64, 16  # DeepSeek-V2-Lite
ROUTINGS = 16
Weights = tuple[Tensor, Tensor]


def expert_weights(device: str = "cuda") -> Weights:
    """1.2 GB of random bf16, one layer's experts; none are zeros."""
    shapes = (COUNT, 2 * INNER, HIDDEN), (COUNT, HIDDEN, INNER)
    first, second = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02) for shape in shapes)
    return first, second


def expert_inputs(tokens: int, device: str = "cuda") -> list[tuple[Tensor, Tensor]]:
    """x and logits of several launches, which choose different experts."""
    return [
        (torch.randn((tokens, HIDDEN), device=device).bfloat16(), torch.randn((tokens, COUNT), device=device).bfloat16())
        for _ in range(ROUTINGS)
    ]


def mixtures(
    weights: Weights, inputs: list[tuple[Tensor, Tensor]], config: tuple[expert_configs.Experts, expert_configs.Experts] | None = None
) -> list[bench_cases.Launch]:
    """Launches of `mixture`, routing included."""
    work = experts.experts_workspace(COUNT, weights[0].device)
    return [
        lambda x=x, logits=logits: experts.mixture(x, logits, *weights, Routing(CHOSEN), workspace=work, config=config)
        for x, logits in inputs
    ]


def vllm_mixtures(weights: Weights, inputs: list[tuple[Tensor, Tensor]]) -> list[bench_cases.Launch]:
    """The same by vLLM's fused experts, its routing included. Raises where it is not installed."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_op
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    def run(x: Tensor, logits: Tensor) -> Tensor:
        top_weights, ids, _ = fused_topk(x, logits, CHOSEN, True)
        return fused_experts_op(x, *weights, top_weights, ids)  # type: ignore[no-any-return]

    return [lambda x=x, logits=logits: run(x, logits) for x, logits in inputs]


def measure_experts() -> dict[str, float]:
    """kernels.grouped_gemm.<tokens>.us, the weights' TB/s, and vLLM's time over ours where it is installed."""
    weights = expert_weights()
    found: dict[str, float] = {}
    for tokens in (1, 8, 64, 256, 544, 2048, 8192):
        inputs = expert_inputs(tokens)
        cases = {"ours": mixtures(weights, inputs)}
        _add_peer(cases, lambda inputs=inputs: vllm_mixtures(weights, inputs))
        timed = bench_cases.alternate(cases, rounds=3)
        touched = sum(len(logits.topk(CHOSEN).indices.unique()) for _, logits in inputs) / len(inputs)
        found[f"kernels.grouped_gemm.{tokens}.us"] = timed["ours"]
        found[f"kernels.grouped_gemm.{tokens}.tb_s"] = touched * 3 * INNER * HIDDEN * 2 / timed["ours"] / 1e6
        if "vllm" in timed:
            found[f"kernels.grouped_gemm.{tokens}.ratio_vllm"] = timed["vllm"] / timed["ours"]
        print(f"experts {tokens:<6}", *(f"{name} {us:.1f} us" for name, us in timed.items()), flush=True)
    return found


def _add_peer(cases: dict[str, list[bench_cases.Launch]], make: Callable[[], list[bench_cases.Launch]]) -> None:
    try:
        launches = make()
        launches[0]()
    except Exception as error:
        print(f"  no vllm: {type(error).__name__} {str(error)[:100]}", flush=True)
    else:
        cases["vllm"] = launches


def latent_launches(batch: int, length: int, config: configs.LatentDecode | None = None, device: str = "cuda") -> list[bench_cases.Launch]:
    """Launches of latent_decode over scattered blocks, in as many sets as it takes to outgrow the L2 cache."""
    blocks_each = -(-length // BLOCK_SIZE)
    sets = min(max(bench_cases.ROTATE_BYTES // (batch * length * (RANK + ROPE) * 2), 1), 64)
    blocks = sets * batch * blocks_each
    k_cache, v_cache = (torch.empty((blocks, 1, BLOCK_SIZE, dim), dtype=torch.bfloat16, device=device).normal_() for dim in (ROPE, RANK))
    tables = torch.randperm(blocks, device=device).to(torch.int32).view(sets, batch, blocks_each)
    q_latent, q_rope = (torch.randn((batch, HEADS, dim), device=device).bfloat16() for dim in (RANK, ROPE))
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    scratch, out = latent.latent_workspace(batch, HEADS, RANK, device).scratch, torch.empty_like(q_latent)
    steps = [StepWorkspace(scratch, StepTiles(batch)) for _ in tables]  # a list of tiles is there for all layers but the first
    scale = (128 + ROPE) ** -0.5
    return [
        lambda table=table, step=step: latent.latent_decode(
            q_latent, q_rope, k_cache, v_cache, table, rows, lens, scale, workspace=step, out=out, config=config
        )
        for table, step in zip(tables, steps)
    ]


def measure_latent() -> dict[str, float]:
    """kernels.latent_decode.<batch>x<length>.us and the cache's TB/s, with 16 heads."""
    found: dict[str, float] = {}
    for batch, length in ((1, 4096), (1, 32768), (64, 1024), (64, 4096), (256, 1024)):
        us = bench_cases.graph_us(latent_launches(batch, length))
        found[f"kernels.latent_decode.{batch}x{length}.us"] = us
        found[f"kernels.latent_decode.{batch}x{length}.tb_s"] = batch * length * (RANK + ROPE) * 2 / us / 1e6
        share = found[f"kernels.latent_decode.{batch}x{length}.tb_s"] / bench_cases.READ_TB_S
        found[f"kernels.latent_decode.{batch}x{length}.share"] = share
        print(f"latent {batch}x{length}: {us:.1f} us, {share:.2f} of {bench_cases.READ_TB_S} TB/s", flush=True)
    return found
