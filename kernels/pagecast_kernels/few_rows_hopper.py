"""Matrix products of up to 128 rows for Hopper (compute capability 9.0) in Gluon: the weight is read as fast as memory gives it.

A program owns a tile of 256 weight rows, or several in turn. A warp keeps a ring of weights full, another one a ring of input rows, 64 of
which belong to each of one or two warpgroups that multiply. Of a weight row 256 B are asked for together: a box is eight rows by 64
columns, and the next columns of these rows come before the next eight rows (128 B of 256 rows at a time are read 5 % slower).

Gated, a tile is 128 gate rows and the up rows that belong to them, and what is written is SiLU(gate) · up. Where the input is a residual
stream whose norm is folded into the weight (row_scales), RMSNorm's factor of each row is found by one program at its start, while its
first weights are on their way, and read by all at their ends, some tens of microseconds later.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagecast_kernels import configs, few_rows
from pagecast_kernels.few_rows import COLUMNS, GROUP, ROWS, STEP, FewRows, Scratch
from pagecast_kernels.hopper_tiles import ring_barriers

X_BOX = 16
"""Input rows of a box: one that reaches past them costs more than a whole one."""


@gluon.constexpr_function
def _rows_of_weight(columns, group):
    """How [columns, 64] lie in a stage: by eights of rows, between which are those of the other columns; 128 B are swizzled."""
    within = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    others = [[0, 0]] * (group.bit_length() - 1)
    return gl.SharedLinearLayout([*within, *others, *([1 << n, 0] for n in range(3, columns.bit_length() - 1))], alignment=1024)


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """The left and the right half of a tensor's columns, by renaming registers."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _chunks(acc, COLUMNS: gl.constexpr):
    """The accumulator in runs of 32 columns."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    left, right = _halves(acc, HALF)
    if COLUMNS == 64:
        return (left, right)
    else:
        return _chunks(left, COLUMNS // 2) + _chunks(right, COLUMNS // 2)


@gluon.jit
def _fetch_weight(
    w_desc, smem, full, empty, columns, tiles, steps, turn,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, DEPTH: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH steps of this program's tiles in flight, whichever tile they belong to."""
    EIGHTS: gl.constexpr = COLUMNS // 16 if GATED else COLUMNS // 8
    stage, phase = tiles * 0, tiles * 0 + 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for n in range(steps):
            step = (n + tile * turn) % steps
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), COLUMNS * 128 * GROUP)
            into = smem.index(stage)
            tma.async_copy_global_to_shared(w_desc, [tile * EIGHTS, step * GROUP, 0, 0], full.index(stage), into.slice(0, EIGHTS))
            if GATED:
                at = columns // 8 + tile * EIGHTS
                tma.async_copy_global_to_shared(w_desc, [at, step * GROUP, 0, 0], full.index(stage), into.slice(EIGHTS, EIGHTS))
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)


@gluon.jit
def _fetch_input(x_desc, smem, full, empty, rows, tiles, steps, turn, PARTS: gl.constexpr, GROUP: gl.constexpr, DEPTH: gl.constexpr):
    """The same of the input rows, 64 columns at a time. Places of rows that there are not hold anything: rows do not meet."""
    BOX: gl.constexpr = x_desc.block_shape[0]
    boxes = (rows + BOX - 1) // BOX
    stage, phase = tiles * 0, tiles * 0 + 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for n in range(steps):
            step = (n + tile * turn) % steps
            for column in range(step * GROUP, step * GROUP + GROUP):
                mbarrier.wait(empty.index(stage), phase)
                for box in gl.static_range(PARTS * 64 // BOX):
                    mbarrier.expect(full.index(stage), (box + 1) * BOX * 128, pred=boxes == box + 1)
                for box in gl.static_range(PARTS * 64 // BOX):
                    into = smem.index(stage * PARTS + box * BOX // 64).slice(box * BOX % 64, BOX)
                    tma.async_copy_global_to_shared(x_desc, [box * BOX, column * 64], full.index(stage), into, pred=box < boxes)
                phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
                stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)


@gluon.jit
def _write(y_ptr, value, row, lane, rows, columns, ADD: gl.constexpr):
    """Store [64, 32] of the result from (row, lane) on, or add it to what is there."""
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    at_row = row + gl.arange(0, 64, layout=gl.SliceLayout(1, IO))
    at_lane = lane + gl.arange(0, 32, layout=gl.SliceLayout(0, IO))
    held = (at_row < rows)[:, None] & (at_lane < columns)[None, :]
    at = y_ptr + at_row[:, None] * columns + at_lane[None, :]
    if ADD:
        total = gl.convert_layout(value, IO) + gl.load(at, mask=held, other=0.0).to(gl.float32)
        gl.store(at, total.to(y_ptr.dtype.element_ty), mask=held)
    else:
        gl.store(at, gl.convert_layout(value.to(y_ptr.dtype.element_ty), IO), mask=held)


@gluon.jit
def _tell_factors(x_ptr, factors_ptr, counters_ptr, rows, depth, eps, first, stride, HIDDEN: gl.constexpr):
    """RMSNorm's factors of this warpgroup's share of the rows, for all programs; the first counter says how many there are."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    column = gl.arange(0, HIDDEN, layout=L)
    for row in range(first, rows, stride):
        x = gl.load(x_ptr + gl.to_tensor(row).to(gl.int64) * depth + column, mask=column < depth, other=0.0).to(gl.float32)
        gl.store(factors_ptr + row, gl.rsqrt(gl.sum(x * x, 0) / depth + eps))
        gl.thread_barrier()
        gl.atomic_add(counters_ptr, 1, sem="acq_rel")


@gluon.jit
def _await_factors(counters_ptr, rows, waiting):
    """Until there are those of all rows; the last of `waiting` warpgroups leaves the counters as they were. All programs run at a time."""
    seen = gl.atomic_add(counters_ptr, 0, sem="acq_rel")
    while seen < rows:
        seen = gl.atomic_add(counters_ptr, 0, sem="acq_rel")
    if gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel") == waiting - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
    gl.thread_barrier()


@gluon.jit
def _before(stage, DEPTH: gl.constexpr):
    """The stage before one. Computed: of a variable set to `stage` before a loop and in it Triton does not see that the loop carries it."""
    return gl.where(stage == 0, DEPTH - 1, stage - 1)


@gluon.jit
def _consume(
    x_ptr, y_ptr, factors_ptr, counters_ptr, rows, columns, depth, eps, x_smem, w_smem, x_full, x_empty, w_full, w_empty, tiles, steps,
    consumer: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, X_DEPTH: gl.constexpr,
    W_DEPTH: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """Input rows consumer · 64 .. + 64 of this program's tiles, one after the other as the rings fill. HIDDEN: of a row that has a factor,
    rounded up, or 0."""
    IN_STAGE: gl.constexpr = _rows_of_weight(COLUMNS, GROUP)
    CHUNK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    x_stage, x_phase, w_stage, w_phase = tiles * 0, tiles * 0, tiles * 0, tiles * 0
    if HIDDEN:
        first, stride = gl.program_id(0) * PARTS + consumer, gl.num_programs(0) * PARTS
        _tell_factors(x_ptr, factors_ptr, counters_ptr, rows, depth, eps, first, stride, HIDDEN)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([64, COLUMNS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
        for _ in range(steps):
            mbarrier.wait(w_full.index(w_stage), w_phase)
            boxes = w_smem.index(w_stage)._reinterpret(x_smem.dtype, [COLUMNS // 8 * GROUP, 8, 64], x_smem.layout)
            for n in gl.static_range(GROUP):
                mbarrier.wait(x_full.index(x_stage), x_phase)
                w = boxes.index(n)._reinterpret(x_smem.dtype, [COLUMNS, 64], IN_STAGE)
                acc = warpgroup_mma(x_smem.index(x_stage * PARTS + consumer), w.permute((1, 0)), acc, is_async=True)
                if n > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    gl.thread_barrier()
                    mbarrier.arrive(x_empty.index(_before(x_stage, X_DEPTH)))
                x_phase = gl.where(x_stage + 1 == X_DEPTH, x_phase ^ 1, x_phase)
                x_stage = gl.where(x_stage + 1 == X_DEPTH, 0, x_stage + 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(x_empty.index(_before(x_stage, X_DEPTH)))
            mbarrier.arrive(w_empty.index(w_stage))
            w_phase = gl.where(w_stage + 1 == W_DEPTH, w_phase ^ 1, w_phase)
            w_stage = gl.where(w_stage + 1 == W_DEPTH, 0, w_stage + 1)
        chunks = _chunks(acc, COLUMNS)
        if GATED:
            if HIDDEN:
                if tile == gl.program_id(0):
                    _await_factors(counters_ptr, rows, gl.num_programs(0) * PARTS)
                row = consumer * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, CHUNK))
                factor = gl.load(factors_ptr + row, mask=row < rows, other=0.0, cache_modifier=".cg")[:, None]
            for c in gl.static_range(COLUMNS // 64):
                gate, up = chunks[c], chunks[c + COLUMNS // 64]
                if HIDDEN:
                    gate, up = gate * factor, up * factor
                value = gate / (1.0 + gl.exp(-gate)) * up
                _write(y_ptr, value, consumer * 64, tile * (COLUMNS // 2) + c * 32, rows, columns, False)
        else:
            for c in gl.static_range(COLUMNS // 32):
                _write(y_ptr, chunks[c], consumer * 64, tile * COLUMNS + c * 32, rows, columns, ADD)


@gluon.jit(do_not_specialize=["rows", "eps", "tiles", "steps", "turn"])
def _few_rows(
    x_desc, w_desc, x_ptr, y_ptr, factors_ptr, counters_ptr, rows, columns, depth, eps, tiles, steps, turn,
    PARTS: gl.constexpr, X_DEPTH: gl.constexpr, W_DEPTH: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, ADD: gl.constexpr,
    GATED: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """y[rows, columns] in `tiles` tiles of COLUMNS weight rows, each of `steps` steps of GROUP · 64 columns of the weight."""
    x_smem = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [X_DEPTH * PARTS, 64, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [W_DEPTH, COLUMNS // 8, GROUP, 8, 64], w_desc.layout)
    x_full, x_empty = ring_barriers(X_DEPTH, PARTS)
    w_full, w_empty = ring_barriers(W_DEPTH, PARTS)
    fence_async_shared()
    gl.thread_barrier()
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    x_ptr, y_ptr, factors_ptr, counters_ptr, rows, columns, depth, eps, x_smem, w_smem, x_full, x_empty, w_full, w_empty,
                    tiles, steps, 0, PARTS, COLUMNS, GROUP, X_DEPTH, W_DEPTH, ADD, GATED, HIDDEN)),
                (_fetch_weight, (w_desc, w_smem, w_full, w_empty, columns, tiles, steps, turn, COLUMNS, GROUP, W_DEPTH, GATED)),
                (_fetch_input, (x_desc, x_smem, x_full, x_empty, rows, tiles, steps, turn, PARTS, GROUP, X_DEPTH)),
            ],
            [1, 1],
            [24, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    x_ptr, y_ptr, factors_ptr, counters_ptr, rows, columns, depth, eps, x_smem, w_smem, x_full, x_empty, w_full, w_empty,
                    tiles, steps, 0, PARTS, COLUMNS, GROUP, X_DEPTH, W_DEPTH, ADD, GATED, HIDDEN)),
                (_consume, (
                    x_ptr, y_ptr, factors_ptr, counters_ptr, rows, columns, depth, eps, x_smem, w_smem, x_full, x_empty, w_full, w_empty,
                    tiles, steps, 1, PARTS, COLUMNS, GROUP, X_DEPTH, W_DEPTH, ADD, GATED, HIDDEN)),
                (_fetch_weight, (w_desc, w_smem, w_full, w_empty, columns, tiles, steps, turn, COLUMNS, GROUP, W_DEPTH, GATED)),
                (_fetch_input, (x_desc, x_smem, x_full, x_empty, rows, tiles, steps, turn, PARTS, GROUP, X_DEPTH)),
            ],
            [4, 1, 1],
            [208, 24, 40],
        )  # fmt: skip


def launch(x: Tensor, weight: Tensor, out: Tensor, config: FewRows, add: bool = False) -> Tensor:
    """out[T, N] = x[T, K] · weight[N, K]ᵀ, or added to what is there. few_rows.suits and few_rows.fits must hold."""
    return _launch(x, weight, out, config, add=add)


def launch_gated(x: Tensor, weight: Tensor, out: Tensor, eps: float | None, config: FewRows, scratch: Scratch) -> Tensor:
    """out[T, I] = SiLU(gate) · up of x[T, K] · weight[2 I, K]ᵀ, the gate's I rows first. few_rows.suits and few_rows.fits must hold.

    eps: each row of x is multiplied by RMSNorm's factor, 1 / sqrt(mean(x²) + eps); None: it is normed. Launches on one scratch follow
    one another.
    """
    return _launch(x, weight, out, config, scratch, gated=True, eps=eps)


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, config: FewRows, scratch: Scratch | None = None, *, add: bool = False, gated: bool = False,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    (rows, depth), columns, weight_rows = x.shape, out.shape[1], weight.shape[0]
    x_desc = TensorDescriptor(x, [rows, depth], [depth, 1], [X_BOX, STEP], gl.NVMMASharedLayout(128, 16, rank=2))
    w_desc = TensorDescriptor(
        weight, [weight_rows // 8, depth // STEP, 8, STEP], [8 * depth, STEP, depth, 1],
        [COLUMNS // 16 if gated else COLUMNS // 8, GROUP, 8, STEP], gl.NVMMASharedLayout(128, 16, rank=4),
    )  # fmt: skip
    tiles = few_rows.tiles(weight_rows)
    scaled = (x, *scratch) if scratch is not None and eps is not None else (None, None, None)
    _few_rows[(min(tiles, configs.processors(x.device)),)](
        x_desc, w_desc, scaled[0], out, *scaled[1:], rows, columns, depth, eps or 0.0, tiles, few_rows.steps(depth), config.turn,
        -(-rows // ROWS), *few_rows.stages(rows), COLUMNS, GROUP, add, gated, 0 if eps is None else triton.next_power_of_2(depth),
        num_warps=4,
    )  # fmt: skip
    return out
