"""Operators for serving on a CPU: same names, arguments and meaning as pagecast_kernels.reference, fewer and larger torch calls.

Products and attention run in the model's own type; what the reference rounds once may be rounded twice here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels.reference import (
    GREEDY_BELOW,
    adjust_logits,
    copy_blocks,
    finish_rows,
    forbid_tokens,
    from_cache,
    gather_padded,
    gather_rows,
    gelu_mul,
    keep_mask,
    latent_decode,
    latent_prefill,
    latent_rope_and_write,
    linear,
    mixture,
    note_tokens,
    paged_prefill,
    philox,
    silu_mul,
    storage,
    to_cache,
)
from pagecast_kernels.reference_row_scales import scaled_qkv
from pagecast_kernels.reference_shards import best_of_shard

__all__ = [
    "add_rms_norm",
    "adjust_logits",
    "best_of_shard",
    "copy_blocks",
    "embedding",
    "finish_rows",
    "forbid_tokens",
    "gather_padded",
    "gather_rows",
    "gelu_mul",
    "latent_decode",
    "latent_prefill",
    "latent_rope_and_write",
    "linear",
    "linear_gelu_mul",
    "linear_silu_mul",
    "mixture",
    "note_tokens",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rope_and_write_kv",
    "sample",
    "silu_mul",
    "top_logprobs",
]

MAX_NOISE = 16.65
"""Above the largest Gumbel noise there is: -log(-log(1 - 2^-24)) = 16.64."""
_FIRST_LOOK = 32
one_row = False
"""Whether a step of one token has operators of its own (models.one_row)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See reference.rms_norm."""
    wide = weight.dtype != x.dtype  # float32 weights beside 16-bit values
    value = F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype) if wide else F.rms_norm(x, weight.shape, weight, eps)
    return value if out is None else out.copy_(value)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See reference.add_rms_norm."""
    return rms_norm(residual.add_(x), weight, eps, out)


def linear_silu_mul(x: Tensor, weight: Tensor, eps: float | None = None, out: Tensor | None = None) -> Tensor:
    """See reference.linear_silu_mul."""
    if eps is not None:
        return silu_mul(F.linear(x, weight), out, residual=x, eps=eps)
    gate, up = F.linear(x, weight).chunk(2, -1)
    return torch.mul(F.silu(gate), up, out=out)


def linear_gelu_mul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """See reference.linear_gelu_mul."""
    gate, up = F.linear(x, weight).chunk(2, -1)
    return torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)


def embedding(token_ids: Tensor, weight: Tensor, *, start: int = 0, out: Tensor | None = None) -> Tensor:
    """See reference.embedding."""
    local = token_ids.long() - start
    held = (local >= 0) & (local < weight.shape[0])
    return torch.mul(weight.index_select(0, local.where(held, 0)), held.unsqueeze(1), out=out)


class _OncePerStep:
    """Remembers what was derived from a step's tensors, so that a model's layers derive it once: for layers of two kinds, twice.

    Holds the tensors, so their identity is safe to compare; they may not be written to while in use.
    """

    def __init__(self) -> None:
        self._held: list[tuple[tuple[object, ...], tuple[Tensor, ...]]] = []

    def get(self, *key: object) -> tuple[Tensor, ...] | None:
        for held, value in self._held:
            if len(key) == len(held) and all(a is b or (isinstance(a, int) and a == b) for a, b in zip(key, held)):
                return value
        return None

    def put(self, value: tuple[Tensor, ...], *key: object) -> tuple[Tensor, ...]:
        self._held = [*self._held[-1:], (key, value)]
        return value


_rope_step = _OncePerStep()
_decode_step = _OncePerStep()


def _rope_indices(cos_sin: Tensor, positions: Tensor, slots: Tensor, num_kv_heads: int, block_size: int) -> tuple[Tensor, ...]:
    """cos and sin [T, 1, D / 2]; tokens to write (int64), and where their heads go in a cache seen as [blocks * Hkv * size, D]."""
    cos, sin = cos_sin.index_select(0, positions.long()).unsqueeze(1).chunk(2, -1)
    tokens = torch.nonzero(slots >= 0).flatten()
    slots = slots.index_select(0, tokens).unsqueeze(1)
    heads = torch.arange(num_kv_heads).unsqueeze(0)
    places = (slots // block_size * num_kv_heads + heads) * block_size + slots % block_size
    return cos.contiguous(), sin.contiguous(), tokens, places.flatten()


def rope_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See reference.rope_and_write_kv."""
    qkv = scaled_qkv(qkv, residual, bias, eps)
    key = (cos_sin, positions, slot_mapping, num_kv_heads, k_cache.shape[2])
    found = _rope_step.get(*key)
    if found is None:
        found = _rope_step.put(_rope_indices(cos_sin, positions, slot_mapping, num_kv_heads, k_cache.shape[2]), *key)
    cos, sin, tokens, places = found
    total, rotated = qkv.shape[0], num_heads + num_kv_heads
    heads = qkv.view(total, rotated + num_kv_heads, head_dim)
    qk = heads[:, :rotated]
    if q_norm is not None:
        qk = torch.cat((rms_norm(qk[:, :num_heads], q_norm, eps), qk[:, num_heads:]), 1)
    if k_norm is not None:
        qk = torch.cat((qk[:, :num_heads], rms_norm(qk[:, num_heads:], k_norm, eps)), 1)
    first, second = qk.chunk(2, -1)
    result = torch.empty((total, rotated, 2, head_dim // 2), dtype=torch.float32)
    torch.mul(first, cos, out=result[:, :, 0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=result[:, :, 1]).addcmul_(first, sin)
    result = result.view(total, rotated, head_dim).to(qkv.dtype)
    k, v = result[:, num_heads:], heads[:, rotated:]
    if len(tokens) != total:
        k, v = k.index_select(0, tokens), v.index_select(0, tokens)
    for cache, value, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        storage(cache).view(-1, head_dim).index_copy_(0, places, to_cache(value, scale, cache).reshape(-1, head_dim))
    q = result[:, :num_heads]
    return q if out_q is None else out_q.copy_(q)


def _decode_indices(
    table: Tensor, rows: Tensor, seq_lens: Tensor, num_kv_heads: int, block_size: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Block-and-head numbers of the batch's pages, in the order (sequence, head, page), a mask [B, 1, 1, S] to add to scores, which places
    [B, 1, 1] are padding, and which of them are to be left as they are, if any."""
    pages = max(-(-int(seq_lens.max()) // block_size), 1)
    lens = seq_lens.long().unsqueeze(1)
    used = torch.arange(pages) * block_size < lens
    blocks = table.index_select(0, rows.long())[:, :pages].long().where(used, 0)
    index = blocks.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads).view(1, -1, 1)
    token = torch.arange(pages * block_size)
    seen = token < lens
    if window:
        seen &= token >= lens - window
    bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    bias.masked_fill_(lens <= 0, 0.0)  # a padding row must not divide zero by zero; its result is thrown away below
    left = lens.view(-1, 1, 1) < 0
    return index.flatten(), bias[:, None, None, :], lens.view(-1, 1, 1) <= 0, left if bool(left.any()) else None


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    workspace: object = None,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See reference.paged_decode. Slots of used blocks must be finite, also beyond a row's length."""
    batch, num_heads, dim = q.shape
    num_kv_heads, size = k_cache.shape[1:3]
    key = (block_table, rows, seq_lens, num_kv_heads, size, window)
    found = _decode_step.get(*key)
    if found is None:
        found = _decode_step.put(_decode_indices(block_table, rows, seq_lens, num_kv_heads, size, window), *key)
    index, bias, empty, left = found
    length = bias.shape[-1]
    pages = (storage(c).view(-1, size * dim).index_select(0, index).view(c.dtype) for c in (k_cache, v_cache))
    k, v = (c.view(batch, num_kv_heads, length, dim) for c in pages)
    if k_scale is not None and v_scale is not None:
        k, v = (from_cache(c, scale, q).to(q.dtype) for c, scale in ((k, k_scale), (v, v_scale)))
    grouped = q.view(batch, num_kv_heads, num_heads // num_kv_heads, dim)
    if q.dtype == torch.float32 and not softcap:
        attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale)
    else:
        scores = torch.matmul(grouped, k.transpose(-1, -2)).float().mul_(scale)
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        attended = torch.matmul(scores.add_(bias).softmax(-1).to(v.dtype), v)
    attended = attended.reshape(batch, num_heads, dim).masked_fill_(empty, 0.0)
    if out is None:
        return attended
    return out.copy_(attended if left is None else torch.where(left, out, attended))


def _scores(scaled: Tensor, rows: Tensor, ids: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor) -> Tensor:
    """scaled[rows, ids] plus the Gumbel noise of just those tokens; rows and ids int64, equal shapes. See reference.gumbel_noise."""
    mask = 0xFFFFFFFF
    counter = (positions.long()[rows] & mask, sequence.long()[rows] & mask)
    key = (seeds[rows] & mask, seeds[rows] >> 32 & mask)
    words = torch.stack(philox((counter[0], counter[1], ids // 4, torch.zeros_like(ids)), key))
    word = words.gather(0, (ids % 4).unsqueeze(0)).squeeze(0)
    uniform = ((word >> 9).float() + 0.5) * 2.0**-23
    return scaled[rows, ids] - torch.log(-torch.log(uniform))


def _draw(scaled: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor) -> Tensor:
    """argmax of scaled[B, V] + Gumbel noise, exactly, computing noise only where it can matter.

    The best score among the few most probable tokens is a bar; a token further below it than the largest noise cannot win.
    """
    batch, vocab = scaled.shape
    likely = scaled.topk(min(_FIRST_LOOK, vocab), -1).indices
    own = torch.arange(batch).unsqueeze(1).expand_as(likely)
    bar = _scores(scaled, own.reshape(-1), likely.reshape(-1), seeds, sequence, positions).view(batch, -1).amax(1, keepdim=True)
    rows, ids = torch.nonzero(scaled > bar - MAX_NOISE, as_tuple=True)
    scores = torch.full_like(scaled, -torch.inf)
    scores[rows, ids] = _scores(scaled, rows, ids, seeds, sequence, positions)
    return scores.argmax(-1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See reference.sample."""
    wide = logits.float()
    best, tokens = wide.max(-1)
    random = torch.nonzero((temperature >= GREEDY_BELOW) & (top_k != 1)).flatten()
    if random.numel():
        scaled = wide[random] / temperature[random].unsqueeze(1)
        limits = (top_k[random], top_p[random], min_p[random])
        if bool(((limits[0] > 0) | (limits[1] < 1) | (limits[2] > 0)).any()):
            scaled = scaled.masked_fill(~keep_mask(scaled, *limits), -torch.inf)
        tokens[random] = _draw(scaled, seeds[random], sequence[random], positions[random])
    chosen = tokens.where(best.isfinite(), -1).int()
    return chosen if out is None else out.copy_(chosen)


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """See reference.top_logprobs; without sorting the vocabulary."""
    wide = logits.float()
    norm = torch.logsumexp(wide, -1, keepdim=True)
    chosen = wide.gather(1, tokens.long().unsqueeze(1)) - norm
    ids = torch.zeros((wide.shape[0], num), dtype=torch.int64)
    if num:
        least = wide.topk(num, -1).values[:, -1:]
        for row, line in enumerate(wide >= least):
            candidates = torch.nonzero(line).flatten()  # ascending, and of equals all
            order = wide[row, candidates].sort(stable=True, descending=True).indices[:num]
            ids[row] = candidates[order]
    return chosen.squeeze(1), ids.int(), wide.gather(1, ids) - norm
