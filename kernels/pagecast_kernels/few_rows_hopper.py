"""Matrix products of up to 128 rows for Hopper (compute capability 9.0) in Gluon: the weight is read as fast as memory gives it.

A producer warp keeps a ring of stages full: 64 columns of COLUMNS weight rows and of all input rows, which are 64 for each of one or two
warpgroups that multiply (rows past the batch come as zeros and cost nothing). The fewer tiles a weight has, the more often its depth is
cut: input rows are read from the L2 cache by every program, and a wide tile reads them less often than a narrow one. What a program has
of a cut tile it leaves in scratch memory, and the parts are added in the order of their columns, whoever comes last.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagecast_kernels import configs, few_rows
from pagecast_kernels.few_rows import ROWS, STEP, FewRows, Workspace


@gluon.jit
def _halves(x, LAYOUT: gl.constexpr):
    """The left and the right half of a tensor's columns, by renaming registers."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _chunks(acc, COLUMNS: gl.constexpr):
    """The accumulator in runs of 32 columns."""
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 4, 16])
    left, right = _halves(acc, H)
    a, b = _halves(left, Q)
    c, d = _halves(right, Q)
    if COLUMNS == 128:
        return (a, b, c, d)
    else:
        E: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
        a0, a1 = _halves(a, E)
        b0, b1 = _halves(b, E)
        c0, c1 = _halves(c, E)
        d0, d1 = _halves(d, E)
        return (a0, a1, b0, b1, c0, c1, d0, d1)


@gluon.jit
def _piece(piece, steps, PIECES: gl.constexpr):
    """(first step, how many) of a piece of a tile."""
    begin = piece * steps // PIECES
    return begin, (piece + 1) * steps // PIECES - begin


@gluon.jit
def _fetch_weight(w_desc, w_smem, full, stage, row, step, W_PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    for part in gl.static_range(W_PARTS):
        at = [row + part * COLUMNS, step * 64]
        tma.async_copy_global_to_shared(w_desc, at, full.index(stage), w_smem.index(stage * W_PARTS + part))


@gluon.jit
def _fetch_input(x_desc, x_smem, full, stage, step, X_PARTS: gl.constexpr):
    for part in gl.static_range(X_PARTS):
        tma.async_copy_global_to_shared(x_desc, [part * 64, step * 64], full.index(stage), x_smem.index(stage * X_PARTS + part))


@gluon.jit
def _produce(
    x_desc, w_desc, x_smem, w_smem, full, empty, tiles, steps,
    DEPTH: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr, COLUMNS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Keep DEPTH steps of this program's pieces in flight, whichever tile they belong to."""
    BYTES: gl.constexpr = (X_PARTS * 64 + W_PARTS * COLUMNS) * 64 * 2
    begin, count = _piece(gl.program_id(0) % PIECES, steps, PIECES)
    row = gl.program_id(0) // PIECES * (W_PARTS * COLUMNS)
    ahead = gl.minimum(count, DEPTH)
    for n in range(ahead):  # What the launch before has no part in.
        mbarrier.expect(full.index(n), BYTES)
        _fetch_weight(w_desc, w_smem, full, n, row, begin + n, W_PARTS, COLUMNS)
    gdc_wait()
    for n in range(ahead):
        _fetch_input(x_desc, x_smem, full, n, begin + n, X_PARTS)
    stage, phase = gl.where(ahead == DEPTH, 0, ahead), gl.where(ahead == DEPTH, 0, 1)
    for unit in range(gl.program_id(0), tiles * PIECES, gl.num_programs(0)):
        row = unit // PIECES * (W_PARTS * COLUMNS)
        begin, count = _piece(unit % PIECES, steps, PIECES)
        for step in range(begin + gl.where(unit == gl.program_id(0), ahead, 0), begin + count):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_weight(w_desc, w_smem, full, stage, row, step, W_PARTS, COLUMNS)
            _fetch_input(x_desc, x_smem, full, stage, step, X_PARTS)
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)


@gluon.jit
def _before(stage, DEPTH: gl.constexpr):
    """The stage before one. Computed: of a variable set to `stage` before a loop and in it Triton does not see that the loop carries it."""
    return gl.where(stage == 0, DEPTH - 1, stage - 1)


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
def _sum(own, piece, part, mask, SIZE: gl.constexpr, PIECES: gl.constexpr):
    """A chunk of all pieces, added in their order. part: where the chunk of piece 0 lies."""
    total = gl.zeros_like(own)
    for other in gl.static_range(PIECES):
        theirs = gl.load(part + other * SIZE, mask=mask & (piece != other), other=0.0, cache_modifier=".cg")
        total += gl.where(piece == other, own, theirs)
    return total


@gluon.jit
def _add_up(
    chunks, y_ptr, counter, parts, piece, first_row, lane, rows, columns,
    CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, PIECES: gl.constexpr, EVEN: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Leave this piece of a tile where the others find it. The last to leave one adds and stores the tile, and sets the counter to zero;
    or, if EVEN, each waits for the others and does so with its share of the columns.

    parts: where piece 0 of this tile and consumer lies. The counter counts who has left a piece, then who has taken them. All programs
    of an EVEN launch run at once, so none waits for one that has not begun.
    """
    COUNT: gl.constexpr = COLUMNS // 32
    SIZE: gl.constexpr = CONSUMERS * 64 * COLUMNS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    row, column = gl.arange(0, 64, layout=gl.SliceLayout(1, L)), gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    mask = (first_row + row < rows)[:, None] & (column < 32)[None, :]
    place = parts + row[:, None] * 32 + column[None, :]
    for c in gl.static_range(COUNT):
        if EVEN:
            gl.store(place + piece * SIZE + c * 2048, chunks[c], mask=mask & (piece != c * PIECES // COUNT))
        else:
            gl.store(place + piece * SIZE + c * 2048, chunks[c], mask=mask)
    gl.thread_barrier()
    arrived = gl.atomic_add(counter, 1, sem="acq_rel")
    if EVEN:
        left = arrived + 1
        while left < PIECES:
            left = gl.atomic_add(counter, 0, sem="acq_rel")
        for c in gl.static_range(COUNT):
            if piece == c * PIECES // COUNT:
                total = _sum(chunks[c], piece, place + c * 2048, mask, SIZE, PIECES)
                _write(y_ptr, total, first_row, lane + c * 32, rows, columns, ADD)
        gl.thread_barrier()
        if gl.atomic_add(counter, 1, sem="acq_rel") == 2 * PIECES - 1:
            gl.store(counter, 0)
    else:
        if arrived == PIECES - 1:
            for c in gl.static_range(COUNT):
                total = _sum(chunks[c], piece, place + c * 2048, mask, SIZE, PIECES)
                _write(y_ptr, total, first_row, lane + c * 32, rows, columns, ADD)
            gl.store(counter, 0)


@gluon.jit
def _consume(
    y_ptr, counters_ptr, parts_ptr, rows, columns, x_smem, w_smem, full, empty, tiles, steps, consumer: gl.constexpr,
    DEPTH: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr, COLUMNS: gl.constexpr, PIECES: gl.constexpr, EVEN: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """64 input rows by COLUMNS weight rows of this program's pieces, one after the other as the ring fills."""
    CONSUMERS: gl.constexpr = X_PARTS * W_PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    gdc_wait()
    stage, phase = tiles * 0, tiles * 0
    for unit in range(gl.program_id(0), tiles * PIECES, gl.num_programs(0)):
        tile, piece = unit // PIECES, unit % PIECES
        count = _piece(piece, steps, PIECES)[1]
        acc = gl.zeros([64, COLUMNS], gl.float32, layout=ACC)
        for step in range(count):
            mbarrier.wait(full.index(stage), phase)
            x, w = x_smem.index(stage * X_PARTS + consumer % X_PARTS), w_smem.index(stage * W_PARTS + consumer % W_PARTS)
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if step > 0:
                gl.thread_barrier()
                mbarrier.arrive(empty.index(_before(stage, DEPTH)))
            phase = gl.where(stage + 1 == DEPTH, phase ^ 1, phase)
            stage = gl.where(stage + 1 == DEPTH, 0, stage + 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(_before(stage, DEPTH)))
        chunks = _chunks(acc, COLUMNS)
        row, lane = consumer % X_PARTS * 64, (tile * W_PARTS + consumer % W_PARTS) * COLUMNS
        if PIECES == 1:
            for c in gl.static_range(COLUMNS // 32):
                _write(y_ptr, chunks[c], row, lane + c * 32, rows, columns, ADD)
        else:
            counter = counters_ptr + tile * CONSUMERS + consumer
            parts = parts_ptr + (tile * PIECES * CONSUMERS + consumer) * (64 * COLUMNS)
            _add_up(
                chunks, y_ptr, counter, parts, piece, row, lane, rows, columns, CONSUMERS, COLUMNS, PIECES, EVEN, ADD
            )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "tiles", "steps"])
def _few_rows(
    x_desc, w_desc, y_ptr, counters_ptr, parts_ptr, rows, columns, tiles, steps,
    DEPTH: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr, COLUMNS: gl.constexpr, PIECES: gl.constexpr, EVEN: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """y[rows, columns] in `tiles` tiles of W_PARTS · COLUMNS, each of `steps` steps in PIECES pieces."""
    kind: gl.constexpr = y_ptr.dtype.element_ty
    gdc_launch_dependents()
    x_smem = gl.allocate_shared_memory(kind, [DEPTH * X_PARTS, 64, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(kind, [DEPTH * W_PARTS, COLUMNS, 64], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(DEPTH):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=X_PARTS * W_PARTS)
    fence_async_shared()
    gl.thread_barrier()
    if X_PARTS * W_PARTS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    y_ptr, counters_ptr, parts_ptr, rows, columns, x_smem, w_smem, full, empty, tiles, steps, 0,
                    DEPTH, X_PARTS, W_PARTS, COLUMNS, PIECES, EVEN, ADD)),
                (_produce, (x_desc, w_desc, x_smem, w_smem, full, empty, tiles, steps, DEPTH, X_PARTS, W_PARTS, COLUMNS, PIECES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    y_ptr, counters_ptr, parts_ptr, rows, columns, x_smem, w_smem, full, empty, tiles, steps, 0,
                    DEPTH, X_PARTS, W_PARTS, COLUMNS, PIECES, EVEN, ADD)),
                (_consume, (
                    y_ptr, counters_ptr, parts_ptr, rows, columns, x_smem, w_smem, full, empty, tiles, steps, 1,
                    DEPTH, X_PARTS, W_PARTS, COLUMNS, PIECES, EVEN, ADD)),
                (_produce, (x_desc, w_desc, x_smem, w_smem, full, empty, tiles, steps, DEPTH, X_PARTS, W_PARTS, COLUMNS, PIECES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch(x: Tensor, weight: Tensor, out: Tensor, work: Workspace, config: FewRows, add: bool = False) -> Tensor:
    """out[T, N] = x[T, K] · weight[N, K]ᵀ, or added to what is there. few_rows.suits and few_rows.fits must hold."""
    (rows, depth), columns = x.shape, out.shape[1]
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    x_desc, w_desc = (
        TensorDescriptor(tensor, list(tensor.shape), [depth, 1], box, gl.NVMMASharedLayout.get_default_for(box, kind))
        for tensor, box in ((x, [ROWS, STEP]), (weight, [config.box, STEP]))
    )
    tiles = config.tiles(columns)
    _few_rows[(min(tiles * config.pieces, configs.processors(x.device)),)](
        x_desc, w_desc, out, work.counters, work.parts, rows, columns, tiles, few_rows.steps(depth),
        config.stages(rows), -(-rows // ROWS), config.columns // config.box, config.box, config.pieces, config.even, add,
        num_warps=4, launch_pdl=config.early,
    )  # fmt: skip
    return out
