"""A mixture of experts: routing, two grouped products and the weighted sum, four launches that read nothing back to the CPU.

Products with quantized weights are in quantized_experts; everything else is the same for them.

Routing appends every (token, place) pair to the list of the expert chosen for it; lists have room for all tokens, so nothing is
sorted. A product's program takes one tile of a list times one block of an expert's columns, and finds its tile from the lists'
lengths, on the device: one captured graph serves any routing. Within a list the order is that of arrival, which no result depends
on: a row of a tile is computed by itself, and a token's parts are added in the order of their places.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagecast_kernels import expert_configs, quantized_experts, wide_experts
from pagecast_kernels.elementwise import activated
from pagecast_kernels.expert_configs import Experts
from pagecast_kernels.expert_lists import tile_ends, tile_pairs
from pagecast_kernels.quantized_weights import PackedExperts, ScaledExperts
from pagecast_kernels.routing import Routing

Weight = Tensor | PackedExperts | ScaledExperts
_COLUMNS = 1024


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, counts_ptr, lists_ptr, tokens, stride, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr, LANES: tl.constexpr, CHOSEN: tl.constexpr,
    CHOSEN_LANES: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0)
    group, place, slot = tl.arange(0, GROUP_LANES), tl.arange(0, LANES), tl.arange(0, CHOSEN_LANES)
    inside = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    expert = group[:, None] * SIZE + place[None, :]
    logits = tl.load(logits_ptr + token.to(tl.int64) * stride + expert, inside, float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + expert, inside, 0.0)
    choice = tl.where(inside & (choice == choice), choice, float("-inf"))
    left = inside
    if CHOSEN_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        if GROUP_TOP == 2:
            at = tl.argmax(choice, 1)
            best += tl.max(tl.where(place[None, :] == at[:, None], float("-inf"), choice), 1)
        taken = group >= GROUPS
        kept = group < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            found = group == tl.min(tl.where(taken | (best < tl.max(tl.where(taken, float("-inf"), best), 0)), GROUP_LANES, group), 0)
            kept = kept | found
            taken = taken | found
        left = left & kept[:, None]
    ids = tl.zeros((CHOSEN_LANES,), tl.int32)
    weights = tl.zeros((CHOSEN_LANES,), tl.float32)
    for j in tl.static_range(CHOSEN):
        # What is left may all be -inf (logits that are no numbers): still a different expert each time.
        top = tl.max(tl.max(tl.where(left, choice, float("-inf")), 1), 0)
        found = tl.minimum(tl.min(tl.min(tl.where(left & (choice >= top), expert, EXPERTS), 1), 0), EXPERTS - 1)
        weight = tl.sum(tl.sum(tl.where(inside & (expert == found), scores, 0.0), 1), 0)
        left = left & (expert != found)
        ids = tl.where(slot == j, found, ids)
        weights = tl.where(slot == j, weight, weights)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    held = slot < CHOSEN
    pair = token * CHOSEN + slot
    at = tl.atomic_add(counts_ptr + ids, 1, held)
    tl.store(lists_ptr + ids.to(tl.int64) * tokens + at, pair, held)
    tl.store(weights_ptr + pair, weights * scale, held)
    tl.store(ids_ptr + pair, ids, held)


@triton.jit(do_not_specialize=["tokens"])
def _expert_product(
    x_ptr, weight_ptr, scales_ptr, counts_ptr, lists_ptr, out_ptr, tokens, N, K,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """GATED: out[pair] = activation(gate) · up of x[token]; else: out[pair] = x[pair] @ weightᵀ times the pair's scale."""
    blocks = tl.cdiv(N, COLUMNS)
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    ends = tile_ends(counts_ptr, EXPERTS, EXPERT_LANES, ROWS)
    if tile >= tl.max(ends, 0):
        return
    expert, pair, held = tile_pairs(tile, ends, counts_ptr, lists_ptr, tokens, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    if GATED:
        source = x_ptr + (pair // CHOSEN).to(tl.int64)[:, None] * K + depth[None, :]
        weights = weight_ptr + expert.to(tl.int64) * (2 * N * K)
    else:
        source = x_ptr + pair.to(tl.int64)[:, None] * K + depth[None, :]
        weights = weight_ptr + expert.to(tl.int64) * N * K
    weights += column[None, :] * K + depth[:, None]
    inside = (column < N)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN:
            x = tl.load(source + k, held[:, None], 0.0)
            w = tl.load(weights + k)
        else:
            rest = depth < K - k
            x = tl.load(source + k, held[:, None] & rest[None, :], 0.0)
            w = tl.load(weights + k, inside & rest[:, None], 0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(weights + N * K + k)
            else:
                w = tl.load(weights + N * K + k, inside & rest[:, None], 0.0)
            up = tl.dot(x, w, up, input_precision="ieee")
    if GATED:
        acc = activated(acc, GELU) * up
    else:
        acc *= tl.load(scales_ptr + pair, held, 0.0)[:, None]
    tl.store(out_ptr + pair.to(tl.int64)[:, None] * N + column[None, :], acc, held[:, None] & inside)


@triton.jit
def _add_parts(
    parts_ptr, out_ptr, counts_ptr, hidden,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, CHOSEN: tl.constexpr, ADD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(CHOSEN):
        total += tl.load(parts_ptr + (token * CHOSEN + j) * hidden + column, inside, 0.0).to(tl.float32)
    if ADD:
        total += tl.load(out_ptr + token * hidden + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, total, inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        index = tl.arange(0, EXPERT_LANES)
        tl.store(counts_ptr + index, tl.zeros((EXPERT_LANES,), tl.int32), index < EXPERTS)


def experts_workspace(experts: int, device: torch.device | str) -> Tensor:
    """How many pairs each expert has, int32[E], zero between launches. One launch at a time may use it, also inside a graph."""
    return torch.zeros(experts, dtype=torch.int32, device=device)


def route(logits: Tensor, bias: Tensor | None, routing: Routing, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See reference_experts.route; weights float32[T, k], experts int32[T, k], and lists int32[E, T] of pairs, counts[E] of them."""
    (tokens, experts), chosen, device = logits.shape, routing.chosen, logits.device
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=device)
    ids = torch.empty((tokens, chosen), dtype=torch.int32, device=device)
    lists = torch.empty((experts, tokens), dtype=torch.int32, device=device)
    _route[(tokens,)](
        logits, bias, weights, ids, counts, lists, tokens, logits.stride(0), routing.scale, experts, routing.groups,
        triton.next_power_of_2(routing.groups), triton.next_power_of_2(experts // routing.groups), chosen,
        triton.next_power_of_2(chosen), routing.chosen_groups, routing.group_top, routing.sigmoid, routing.renormalise,
        bias is not None, num_warps=1,
    )  # fmt: skip
    return weights, ids, lists


def _product(
    x: Tensor, weight: Weight, scales: Tensor, counts: Tensor, lists: Tensor, chosen: int, first: bool, gelu: bool,
    config: Experts | None,
) -> Tensor:  # fmt: skip
    """The products of all pairs by whichever kernel takes the weight; first: activated and gated."""
    if isinstance(weight, PackedExperts):
        return quantized_experts.packed_product(x, weight, scales, counts, lists, chosen, first, gelu, config)
    if isinstance(weight, ScaledExperts):
        return quantized_experts.scaled_product(x, weight, scales, counts, lists, chosen, first, gelu, config)
    experts, tokens = lists.shape
    columns, depth = weight.shape[1] // 2 if first else weight.shape[1], weight.shape[2]
    pairs = tokens * chosen
    if config is None:
        config = expert_configs.experts(pairs, experts, weight.element_size(), x.device)[0 if first else 1]
    if config.wide:
        return wide_experts.wide_product(x, weight, scales, counts, lists, chosen, first, gelu, config)
    tiles = min(pairs // config.rows + min(pairs, experts), pairs)
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    even = depth % config.depth == 0 and columns % config.columns == 0
    _expert_product[(tiles * triton.cdiv(columns, config.columns),)](
        x, weight, scales, counts, lists, out, tokens, columns, depth, experts, triton.next_power_of_2(experts), chosen, first, gelu,
        config.rows, config.columns, config.depth, config.stages, even, num_warps=config.warps,
    )  # fmt: skip
    return out


def mixture(
    x: Tensor, logits: Tensor, gate_up: Weight, down: Weight, routing: Routing, *, bias: Tensor | None = None, gelu: bool = False,
    into: Tensor | None = None, workspace: Tensor | None = None, config: tuple[Experts, Experts] | None = None,
) -> Tensor:  # fmt: skip
    """See reference_experts.mixture. All contiguous but logits' rows. config overrides the launch table of both products."""
    (tokens, hidden), experts = x.shape, logits.shape[1]
    out = torch.empty_like(x) if into is None else into
    if not tokens:
        return out
    counts = experts_workspace(experts, x.device) if workspace is None else workspace
    weights, _, lists = route(logits, bias, routing, counts)
    first, second = (None, None) if config is None else config
    inner = _product(x, gate_up, weights, counts, lists, routing.chosen, True, gelu, first)
    parts = _product(inner, down, weights, counts, lists, routing.chosen, False, False, second)
    _add_parts[(tokens, triton.cdiv(hidden, _COLUMNS))](
        parts, out, counts, hidden, experts, triton.next_power_of_2(experts), routing.chosen, into is not None, _COLUMNS, num_warps=4
    )
    return out
