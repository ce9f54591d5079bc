"""Launch tables: how each kernel is launched, as a pure function of shapes and of the device's processors and shared memory.

No kernel is tuned while it serves. The figures come from `kernels/gpu_check.py` on an NVIDIA H200. GPUs whose programs may have less
shared memory than an H200's also have other tensor cores, whose operands and sums lie in registers: their launches are made so that
they fit and do not spill, by `kernels/compile_check.py`, and are not measured. Nor are those of float32: no tensor core multiplies it
without loss, so each thread holds whole rows of a product's operands, and tiles are as small as registers want them.
"""

import functools
import math
from dataclasses import dataclass

import torch

_LOG2E = 1.4426950408889634
PREFIX_ROWS = 128  # query rows of an item of shared_prefix: sequences times the heads that share a KV head
MAX_SLICES = 64  # programs that may share a row of `sample`
MAX_CUT_SLICES = 16  # programs that may share a row of `find_cutoffs`
_PROGRAMS_PER_PROCESSOR = 8  # the most that any decode launch uses
_KIB = 1024
MUCH = 227 * _KIB  # of shared memory: what the measured launches may use


@dataclass(frozen=True)
class Decode:
    """tile: KV tokens a step; programs: how many share the work; warps, stages, most registers a thread: of each.

    team: of decode_flat alone, programs whose parts are added first where a sequence falls to many, a power of two; 0 for all at once.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    registers: int = 255
    team: int = 0


@dataclass(frozen=True)
class LatentDecode:
    """rows: query heads of a tile, padded; of 64 on, products are a warpgroup's. The rest as in Decode."""

    rows: int
    tile: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True)
class Prefill:
    """rows: query rows (tokens × heads of a KV head) of a program; tile: KV tokens a step."""

    rows: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class HopperPrefill:
    """The warp-specialised prefill of Hopper. tile: KV tokens a step; stages: tiles in flight."""

    tile: int
    stages: int


@dataclass(frozen=True)
class HopperDecode:
    """The warp-specialised decode of Hopper. tile: KV tokens a step; depth: tiles in flight of a program; programs: how many share the
    work; registers: of a thread at the start, of which `fetching` are left to those that only fetch and the others get the rest; by_head:
    whether a share is of one KV head, of which all have equally many programs; team: of latents, programs whose parts one of them adds up
    where a sequence has many, 0 leaves all to another launch."""

    tile: int
    depth: int
    programs: int
    registers: int
    fetching: int = 40
    by_head: bool = False
    team: int = 0


class UnsupportedError(ValueError):
    """A kernel that the device cannot run: a number format that it does not have, more shared memory than it gives."""


@functools.cache
def is_hopper(device: torch.device | str) -> bool:
    """Whether the device has Hopper's tensor copy engine and warpgroup products (compute capability 9.0)."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def processors(device: torch.device | str) -> int:
    """How many streaming multiprocessors the device has; a few on the CPU, where the interpreter stands in."""
    if torch.device(device).type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_of(arch: int) -> int:
    """Bytes of shared memory that one program may have, by compute capability (CUDA C++ programming guide, technical specifications)."""
    return {80: 163 * _KIB, 87: 163 * _KIB, 90: MUCH, 100: MUCH, 103: MUCH}.get(arch, 99 * _KIB)


@functools.cache
def arch(device: torch.device | str) -> int:
    """The device's compute capability, 90 for 9.0; an H200's on the CPU, where the interpreter stands in."""
    if torch.device(device).type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device | str) -> int:
    """Bytes of shared memory that one program may have on the device."""
    return shared_memory_of(arch(device))


def check_e4m3(device: torch.device | str) -> None:
    """Raises UnsupportedError where the GPU converts no values of e4m3."""
    if arch(device) < 89:
        raise UnsupportedError(f"values of e4m3 need a GPU of compute capability 8.9 or more, this one has {arch(device) / 10}")


def rotates_in_product(device: torch.device | str) -> bool:
    """Whether the one-row product that makes heads also rotates them and writes K and V, where nothing norms them first."""
    return arch(device) == 90


FEW_PAIRS = 64
"""Pairs of a sequence and a KV head up to which a decode is one of few sequences: what it takes to begin and to end is then most of it."""
MANY_PAIRS = 512
"""Pairs from which on a decode is one of many sequences."""


def max_decode_programs(device: torch.device | str) -> int:
    return _PROGRAMS_PER_PROCESSOR * processors(device)


def decode(batch: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device | str, itemsize: int = 2) -> Decode:
    """Launch of paged_decode for query groups of `group` heads, over a cache of values of `itemsize` bytes."""
    if itemsize > 2:
        return _wide_decode(device)
    if shared_memory(device) < MUCH:
        return _small_decode(head_dim, device)
    if head_dim > 128 or group > 16:
        return Decode(tile=32, warps=4, stages=3, programs=2 * processors(device))
    if itemsize == 1 and head_dim == 128 and batch * num_kv_heads >= MANY_PAIRS and arch(device) == 90:
        # What decode_hopper_bytes does not take: windows, soft-caps, larger groups. It spills four words outside its loop over tokens.
        return Decode(tile=32, warps=1, stages=3, programs=even(8 * processors(device)))
    if itemsize == 1:
        return Decode(tile=64, warps=2, stages=3, programs=4 * processors(device))
    if FEW_PAIRS < batch * num_kv_heads <= 1024:
        return Decode(tile=64, warps=4, stages=3, programs=2 * processors(device))
    return Decode(tile=64, warps=2, stages=3, programs=(2 if batch * num_kv_heads <= FEW_PAIRS else 3) * processors(device))


def _wide_decode(device: torch.device | str) -> Decode:
    """Both decodes over float32."""
    return Decode(tile=16, warps=8, stages=2, programs=processors(device))


def _small_decode(head_dim: int, device: torch.device | str) -> Decode:
    """Both decodes where there is less shared memory than an H200 has: two programs fit a processor."""
    stages = 3 if head_dim <= 128 and shared_memory(device) > 99 * _KIB else 2
    return Decode(tile=32, warps=4, stages=stages, programs=2 * processors(device))


def _is_power_of_2(n: int) -> bool:
    return n & n - 1 == 0


def even(programs: int) -> int:
    """The power of two below `programs` if it is nearly as many: sequences of equal lengths then fall whole to programs, or in equal
    parts, which is worth more than the last processors."""
    power = 1 << programs.bit_length() - 1
    return power if 16 * power >= 15 * programs else programs


def decode_flat(batch: int, num_kv_heads: int, head_dim: int, device: torch.device | str, itemsize: int = 2) -> Decode:
    """Launch of decode_flat.paged_decode over values of `itemsize` bytes, where decode_hopper does not take it.

    Measured with 8 KV heads of size 128 in groups of 4. The few sequences' launch is best for one of 32,768 and for 8 of 1,024.
    """
    if itemsize > 2:
        return _wide_decode(device)
    if shared_memory(device) < MUCH:
        return _small_decode(head_dim, device)
    pairs, warps = batch * num_kv_heads, 2 if arch(device) == 90 else 4  # two warps have registers enough on Hopper alone
    if head_dim > 64 and _is_power_of_2(num_kv_heads):
        if pairs <= FEW_PAIRS:
            return Decode(tile=64, warps=warps, stages=3, programs=even(2 * processors(device)), team=8)
        return Decode(tile=64, warps=warps, stages=2, programs=even(4 * processors(device)))
    if pairs <= 8:
        return Decode(tile=64, warps=4, stages=4, programs=processors(device))
    if pairs <= FEW_PAIRS:
        return Decode(tile=64, warps=4, stages=3, programs=2 * processors(device))
    return Decode(tile=64, warps=warps, stages=2, programs=4 * processors(device))


def decode_hopper(
    batch: int, num_kv_heads: int, group: int, head_dim: int, block_size: int, device: torch.device | str
) -> HopperDecode | None:  # fmt: skip
    """Launch of decode_hopper where it is the faster one, None where decode_flat is: 96 KiB of tiles in flight on every processor for few
    sequences, 192 for many, whose programs are of one KV head each.

    Measured on an H200, 30 November 2026, with 2 to 32 KV heads of size 64 and 128 in groups of 1 to 8, blocks of 16 and 64: ragged lengths
    gain 1 to 31 %, the more the larger the group and the fewer they are; equal ones of groups of 4 and more lose up to 1 %.
    """
    if batch * num_kv_heads <= 2 * FEW_PAIRS:
        programs = even(processors(device)) if _is_power_of_2(num_kv_heads) else processors(device)
        return HopperDecode(tile=64, depth=3, programs=programs, registers=144)
    if group > 8 or block_size < 16:  # which spill
        return None
    programs = max(3 * processors(device) // num_kv_heads, 1) * num_kv_heads
    return HopperDecode(tile=64, depth=2, programs=programs, registers=80, fetching=32, by_head=True)


HOPPER_PREFILL = HopperPrefill(tile=128, stages=2)
"""Where prefill_hopper.suits: 1.13 to 1.15 times FlashAttention 3 on an H200 at 1 x 8,192."""


def prefill(head_dim: int, device: torch.device | str, itemsize: int = 2) -> Prefill:
    """Launch of paged_prefill over a cache of values of `itemsize` bytes."""
    if itemsize > 2:
        return Prefill(rows=32, tile=16, warps=8, stages=2)
    if shared_memory(device) < MUCH:
        if head_dim > 128:
            return Prefill(rows=64, tile=32, warps=8, stages=2)
        return Prefill(rows=128, tile=32 if head_dim > 64 else 64, warps=8, stages=3)
    if head_dim > 128:
        return Prefill(rows=128, tile=32, warps=8, stages=2)
    return Prefill(rows=128, tile=32 if head_dim <= 64 and arch(device) >= 100 else 64, warps=8, stages=3)


def shared_prefix(head_dim: int, device: torch.device | str, itemsize: int = 2) -> Prefill:
    """Launch of the prefix's part of shared_prefix.paged_decode_shared, over values of `itemsize` bytes. rows: PREFIX_ROWS, or a
    fraction of them."""
    if itemsize > 2:
        return Prefill(rows=PREFIX_ROWS // 4, tile=16, warps=8, stages=2)
    if shared_memory(device) < MUCH:
        return Prefill(rows=PREFIX_ROWS // 2, tile=32, warps=8, stages=2)
    if head_dim > 128:
        return Prefill(rows=PREFIX_ROWS, tile=16, warps=8, stages=2)
    return Prefill(rows=PREFIX_ROWS, tile=64, warps=8, stages=3)


def depth_of(depth: int, itemsize: int) -> int:
    """Inputs a step for values of `itemsize` bytes, where `depth` of two bytes are right: the same shared memory."""
    return 2 * depth // itemsize


def latent_groups(heads: int, most: int) -> int:
    """Into how many equal groups of at most `most` the heads of latent attention are put, each a tile of its own."""
    return next(groups for groups in range(1, heads + 1) if heads % groups == 0 and heads // groups <= most)


def _small_latents(device: torch.device | str, itemsize: int) -> bool:
    """Whether tiles of latents must be small. Of 512 float32 each, the smallest tile and its queries take 100 KiB."""
    if itemsize > 2 and shared_memory(device) <= 99 * _KIB:
        raise UnsupportedError("latent attention over float32 needs 100 KiB of shared memory a program, this GPU has 99: use 16 bits")
    return shared_memory(device) < MUCH


LATENT_DECODE_HEADS = 32
"""Most heads of a tile of latent_decode: of 64, values and parts no longer fit a program's registers."""


def latent_decode(group: int, device: torch.device | str, itemsize: int = 2) -> LatentDecode:
    """Launch of latent.latent_decode for groups of so many heads, over values of `itemsize` bytes. Raises UnsupportedError."""
    small = _small_latents(device, itemsize)
    if itemsize > 2:
        return LatentDecode(rows=32 if group > 16 else 16, tile=16, warps=8, stages=2, programs=processors(device))
    if group > 16:
        return LatentDecode(rows=32, tile=32, warps=8, stages=2 if small else 3, programs=processors(device))
    return LatentDecode(rows=16, tile=32 if small else 64, warps=4, stages=2, programs=2 * processors(device))


LATENT_FEW = 8
"""Sequences up to which each has parts of many programs: they are added by a launch of their own, in small pieces."""


def latent_hopper(batch: int, device: torch.device | str) -> HopperDecode:
    """Launch of latent_hopper, whose tile is the rows of a warpgroup's product, of which shared memory holds two. Measured with 16 heads on
    an H200, 30 November 2026."""
    team = 0 if batch <= LATENT_FEW else 8
    return HopperDecode(tile=64, depth=2, programs=even(processors(device)), registers=144, team=team)


def latent_prefill(device: torch.device | str, itemsize: int = 2) -> Prefill:
    """Launch of latent.latent_prefill over values of `itemsize` bytes. Raises UnsupportedError."""
    if _small_latents(device, itemsize):
        return Prefill(rows=32 if itemsize == 2 else 16, tile=32 if itemsize == 2 else 16, warps=8, stages=2)
    return Prefill(rows=32, tile=16, warps=8, stages=2) if itemsize > 2 else Prefill(rows=64, tile=32, warps=8, stages=2)


def score_scale(scale: float, softcap: float) -> tuple[float, float]:
    """(factor, cap) that turn q·k into base-2 scores: q·k · factor, or with a soft-cap (1 - 2 / (exp2(q·k · factor) + 1)) · cap.

    The latter is log2(e) · softcap · tanh(q·k · scale / softcap), as tanh(x) = 1 - 2 / (exp(2x) + 1).
    """
    if softcap:
        return scale * 2.0 * _LOG2E / softcap, softcap * _LOG2E
    return scale * _LOG2E, 0.0


def blas_library(rows: int) -> str:
    """torch's name of the library for products of so many rows. All products of an 8B step, ms, cublaslt against cublas: 32 rows 4.13
    and 4.24, 64: 4.12 and 4.34, 96: 4.25 and 4.52, 128: 4.65 and 4.66, 160: 4.83 and 4.96, 192: 5.60 and 5.42, 256: 6.78 and 6.32."""
    return "cublaslt" if 16 < rows <= 160 else "cublas"


@dataclass(frozen=True)
class Draws:
    """How rows of logits are drawn from: programs that share a row, a power of two, logits a step, warps, and whether the programs of a
    row tell each other their best score, so that each needs the noise of fewer tokens."""

    slices: int
    tile: int
    warps: int
    shared: bool

    def slice_size(self, vocab: int) -> int:
        """Logits of a program: whole steps."""
        return -(-vocab // (self.tile * self.slices)) * self.tile


def draws(batch: int, vocab: int, device: torch.device | str) -> Draws:
    """Many rows by programs of one warp, which wait for nobody, about 32 of them to a processor; few by programs of eight warps, about four
    to a processor. On an H200, rows of 128,256: 256 of them 55 us so, 60 to 114 by larger programs; 64 rows 27, and 26 to 38; 16 rows 12
    either way; 1 row 6, and 10 by single warps."""
    if batch >= 32:
        wanted = min(32 * processors(device) / batch, vocab / 512, MAX_SLICES)
        return Draws(1 << max(round(math.log2(max(wanted, 1))), 0), 256, 1, True)
    wanted = min(4 * processors(device) // batch, vocab // 4096, 32)
    return Draws(1 << max(wanted, 1).bit_length() - 1, 2048, 8, False)


def cut_slices(batch: int, vocab: int, device: torch.device | str) -> int:
    """Programs per row of `find_cutoffs`, a power of two: several of them to a processor, each with 4,096 logits or more."""
    wanted = min(8 * processors(device) // batch, vocab // 4096, MAX_CUT_SLICES)
    return 1 << max(wanted, 1).bit_length() - 1


def judge_slices(batch: int, vocab: int, device: torch.device | str) -> int:
    """Programs of 16 warps per row of `finish_open_rows`: few values, as its kernel is compiled for each of them."""
    wanted = min(2 * processors(device) // batch, vocab // 4096)
    return next(slices for slices in (16, 4, 1) if slices <= max(wanted, 1))


def beside_the_last(early: bool) -> dict[str, bool]:
    """Options of a launch that may be made ready beside the one before it, and waits by itself: none where devices cannot, early False."""
    return {"launch_pdl": True} if early else {}


def row_warps(block: int) -> int:
    """Warps for a program that holds a row of `block` values: eight to a thread where the row is long."""
    return min(max(block // 256, 1), 16)


def lanes_for(sequences: int) -> int:
    """A power of 4 from 16 on that holds so many: few values, as kernels are compiled for each of them."""
    lanes = 16
    while lanes < sequences:
        lanes *= 4
    return lanes


def log2_ceil(n: int) -> int:
    return max(math.ceil(math.log2(n)), 0)


def all_reduce_tile(count: int) -> int:
    """Elements of a program of all_reduce: small messages are spread over many programs, large ones read in long runs."""
    return 1024 if count <= 1 << 16 else 4096


@dataclass(frozen=True)
class AllReduce:
    """Bytes up to which a sum over ranks goes in one shot, from there in two, and beyond both through NCCL. fused_rows: rows up to
    which the residual sum and the norm are done in the same launch."""

    one_shot: int
    two_shots: int
    fused_rows: int


def all_reduce(ranks: int) -> AllReduce:
    """For so many GPUs of one host, each linked to every other. Two: measured on H200s, where one shot wins at every size up to the
    8 MB that the shared memory holds, by 2 at 8 KB and 1.5 at 8 MB, and the norm is best done with it at any number of rows."""
    if ranks == 2:
        return AllReduce(one_shot=8 << 20, two_shots=0, fused_rows=512)
    if ranks in (4, 8):
        return AllReduce(one_shot=256 << 10, two_shots=4 << 20, fused_rows=32 if ranks == 4 else 16)
    return AllReduce(one_shot=256 << 10, two_shots=0, fused_rows=16)
