"""Plain torch twins of the operators of multi-head latent attention (DeepSeek-V2; see latent).

Terms. L size of a token's latent vector, which gives every head's key and value; R size of its rotated key, shared by all heads.
k_cache [blocks, 1, block_size, R] holds rotated keys, v_cache [blocks, 1, block_size, L] latents. Queries are brought into the
latent space first, so a head's score is q_latent · latent + q_rope · key, and what it attends to is a mean of latents.
"""

import torch
from torch import Tensor


def latent_rope_and_write(
    q_rope: Tensor, kv: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor,
    v_cache: Tensor, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write rms_norm(kv[T, :L], norm[L]) and the rotated kv[T, L:] to their slots. Returns q_rope[T, Hq, R], rotated.

    cos_sin[max_pos, R] float32, cosines first; positions int32[T]; slot_mapping int64[T], of which negative ones write nothing.
    """
    rank = norm.shape[0]
    kind = torch.float64 if kv.dtype == torch.float64 else torch.float32
    cos, sin = cos_sin[positions.long()].to(kind).chunk(2, -1)
    latent, key = kv[:, :rank].to(kind), kv[:, rank:].to(kind)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * norm.to(kind)
    tokens = torch.nonzero(slot_mapping >= 0).flatten()
    slots = slot_mapping[tokens].long()
    block, offset = slots // v_cache.shape[2], slots % v_cache.shape[2]
    k_cache[block, 0, offset] = _rotate(key, cos, sin)[tokens].to(k_cache.dtype)
    v_cache[block, 0, offset] = latent[tokens].to(v_cache.dtype)
    rotated = _rotate(q_rope.to(kind), cos.unsqueeze(1), sin.unsqueeze(1)).to(q_rope.dtype)
    return rotated if out is None else out.copy_(rotated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attend(q_latent: Tensor, q_rope: Tensor, key: Tensor, latent: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Means [.., Hq, L] for q_latent[.., Hq, L], q_rope[.., Hq, R]; key[S, R], latent[S, L]; seen bool, broadcastable to [.., Hq, S]."""
    kind = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    latent = latent.to(kind)
    scores = (q_latent.to(kind) @ latent.transpose(-1, -2) + q_rope.to(kind) @ key.to(kind).transpose(-1, -2)) * scale
    return (torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ latent).to(q_latent.dtype)


def latent_decode(
    q_latent: Tensor, q_rope: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, seq_lens: Tensor, scale: float,
    *, workspace: object = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query token per sequence: q_latent[B, Hq, L] and q_rope[B, Hq, R] -> [B, Hq, L]. Tables as in reference.paged_decode."""
    result = torch.zeros_like(q_latent) if out is None else out
    size = v_cache.shape[2]
    for index, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if length == 0:
            result[index] = 0.0
        elif length > 0:
            blocks = block_table[row, : -(-length // size)].long()
            key, latent = (cache[blocks].flatten(0, 2)[:length] for cache in (k_cache, v_cache))
            seen = torch.ones(1, dtype=torch.bool, device=key.device)
            result[index] = _attend(q_latent[index], q_rope[index], key, latent, seen, scale)
    return result


def latent_prefill(
    q_latent: Tensor, q_rope: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, rows: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, *, max_query_len: int, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A chunk of query tokens per sequence, causally: q_latent[T, Hq, L], q_rope[T, Hq, R] -> [T, Hq, L]; see reference.paged_prefill."""
    del max_query_len  # only the launcher needs it, for its grid
    result = torch.zeros_like(q_latent) if out is None else out
    starts, size = query_start_loc.tolist(), v_cache.shape[2]
    for n, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = starts[n], starts[n + 1]
        if begin == end:
            continue
        blocks = block_table[row, : -(-length // size)].long()
        key, latent = (cache[blocks].flatten(0, 2)[:length] for cache in (k_cache, v_cache))
        query = torch.arange(length - (end - begin), length, device=key.device).view(-1, 1, 1)
        seen = torch.arange(length, device=key.device) <= query
        result[begin:end] = _attend(q_latent[begin:end], q_rope[begin:end], key, latent, seen, scale)
    return result
