"""Plain torch twins of every operator: what the Triton kernels are tested against, and the CPU backend's speed path.

Each function has the name, arguments and meaning of its Triton launcher (see `triton_ops`). Arithmetic is float32, or float64
where the inputs are float64, and is rounded once at the end. Twins may wait for the device and may allocate by value; the
Triton launchers may not.

Terms. T tokens of a step; B or N sequences of a step; H hidden size; I intermediate size; V vocabulary; D head size; Hq and Hkv
query and KV heads, Hq a multiple of Hkv. KV caches are [num_blocks, Hkv, block_size, D] per layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels.reference_experts import mixture as mixture
from pagecast_kernels.reference_experts import route as route
from pagecast_kernels.reference_latent import latent_decode as latent_decode
from pagecast_kernels.reference_latent import latent_prefill as latent_prefill
from pagecast_kernels.reference_latent import latent_rope_and_write as latent_rope_and_write
from pagecast_kernels.reference_row_scales import row_scale, scaled_qkv
from pagecast_kernels.reference_token_rules import adjust_logits as adjust_logits
from pagecast_kernels.reference_token_rules import forbid_tokens as forbid_tokens
from pagecast_kernels.reference_token_rules import note_tokens as note_tokens

GREEDY_BELOW = 1e-5  # a temperature below this is 0
_MASK32 = 0xFFFFFFFF


def _accurate(x: Tensor) -> Tensor:
    """x in the type that arithmetic is done in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def storage(cache: Tensor) -> Tensor:
    """The cache as torch can index it: bytes where values have 8 bits."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def to_cache(value: Tensor, scale: Tensor | None, cache: Tensor) -> Tensor:
    """value[T, Hkv, D] as the cache stores it: with scales float32[Hkv] divided by them and kept in the range of e4m3."""
    if scale is not None:
        value = (value / scale.to(value.dtype).view(-1, 1)).clamp(-448.0, 448.0)
    return storage(value.to(cache.dtype))


def from_cache(tokens: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    """Gathered tokens [.., Hkv, S, D] in the type that q's arithmetic is done in; 8-bit ones times their heads' scales."""
    if scale is None:
        return _accurate(tokens)
    wide = tokens.to(torch.promote_types(q.dtype, torch.float32))
    return wide * scale.to(wide.dtype).view(-1, 1, 1)


def _give(value: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """value rounded to dtype; written into out where the caller gave one."""
    return value.to(dtype) if out is None else out.copy_(value)


# --- norms, activations, products ----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x[T, H] / sqrt(mean(x²) + eps) · weight[H] (Zhang and Sennrich 2019)."""
    wide = _accurate(x)
    return _give(wide * row_scale(wide, eps) * _accurate(weight), out, x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """residual[T, H] += x[T, H] in place; returns rms_norm of the sum, which is taken before it is rounded to residual's dtype."""
    total = _accurate(x) + _accurate(residual)
    residual.copy_(total)
    return _give(total * row_scale(total, eps) * _accurate(weight), out, x.dtype)


def silu_mul(gate_up: Tensor, out: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """silu(gate) · up for gate_up[T, 2I] = gate | up, first times the row_scale of residual[T, H] where that is given. Returns [T, I]."""
    wide = _accurate(gate_up) if residual is None else _accurate(gate_up) * row_scale(residual, eps)
    gate, up = wide.chunk(2, -1)
    return _give(F.silu(gate) * up, out, gate_up.dtype)


def gelu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu(gate) · up for gate_up[T, 2I] = gate | up, with gelu's tanh form (Hendrycks and Gimpel 2016). Returns [T, I]."""
    gate, up = _accurate(gate_up).chunk(2, -1)
    return _give(F.gelu(gate, approximate="tanh") * up, out, gate_up.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x[M, K] · weight[N, K]ᵀ + bias[N]. Returns [M, N] in x's dtype."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def linear_silu_mul(x: Tensor, weight: Tensor, eps: float | None = None, out: Tensor | None = None) -> Tensor:
    """silu_mul(linear(x[M, K], weight[2I, K])), rounded once. Returns [M, I]. eps: of a residual stream x, whose rows are multiplied by
    RMSNorm's factor, 1 / sqrt(mean(x²) + eps); see silu_mul."""
    gate_up = F.linear(x, weight)
    return silu_mul(gate_up, out) if eps is None else silu_mul(gate_up, out, residual=x, eps=eps)


def linear_gelu_mul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """gelu_mul(linear(x[M, K], weight[2I, K])), rounded once. Returns [M, I]."""
    return gelu_mul(F.linear(x, weight), out)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual[M, N] += x[M, K] · weight[N, K]ᵀ, in place, rounded once. Returns residual."""
    return residual.copy_(_accurate(residual) + F.linear(_accurate(x), _accurate(weight)))


def norm_linear(
    x: Tensor, gamma: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """linear(rms_norm(x[M, K], gamma[K]), weight[N, K], bias[N]), rounded once. Returns [M, N]."""
    wide = None if bias is None else _accurate(bias)
    return _give(F.linear(rms_norm(_accurate(x), gamma, eps), _accurate(weight), wide), out, x.dtype)


def norm_linear_silu_mul(x: Tensor, gamma: Tensor, eps: float, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_mul(norm_linear(x[M, K], gamma, weight[2I, K])), rounded once. Returns [M, I]."""
    return _give(silu_mul(F.linear(rms_norm(_accurate(x), gamma, eps), _accurate(weight))), out, x.dtype)


def embedding(token_ids: Tensor, weight: Tensor, *, start: int = 0, out: Tensor | None = None) -> Tensor:
    """weight[id - start] for token_ids int[T]; zeros outside [start, start + len(weight)): vocabulary shards add up."""
    local = token_ids.long() - start
    held = (local >= 0) & (local < weight.shape[0])
    return _give(weight[local.where(held, 0)] * held.unsqueeze(-1), out, weight.dtype)


# --- KV cache --------------------------------------------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotation: the first half of a head pairs with its second half. x[T, heads, D]; cos, sin [T, 1, D/2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


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
    """Normalise each head of q and k where weights [D] are given, rotate both, write k and v to their slots. Returns q[T, Hq, D].

    qkv[T, (Hq + 2·Hkv)·D]; cos_sin[max_pos, D] float32, cosines in the first half and sines in the second; positions int32[T];
    slot_mapping int64[T] is block · block_size + offset, and a negative slot writes nothing. Caches of float8_e4m3fn hold k and v
    divided by k_scale and v_scale, float32[Hkv]. Before all that, qkv is multiplied by the row_scale of residual[T, H] and gets
    bias[(Hq + 2·Hkv)·D] added, where they are given.
    """
    heads = scaled_qkv(_accurate(qkv), residual, bias, eps).view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions.long()].to(heads.dtype).unsqueeze(1).chunk(2, -1)
    slots, tokens = slot_mapping.long(), torch.arange(qkv.shape[0], device=qkv.device)
    if bool((slots < 0).any()):
        tokens = tokens[slots >= 0]
        slots = slots[tokens]
    block, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    storage(k_cache)[block, :, offset] = to_cache(_rotate(k, cos, sin)[tokens], k_scale, k_cache)
    storage(v_cache)[block, :, offset] = to_cache(v[tokens], v_scale, v_cache)
    return _give(_rotate(q, cos, sin), out_q, qkv.dtype)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks src[i] to dst[i] (int[n]) in one layer's caches. No block may be both source and destination, unless of itself."""
    for cache in (storage(k_cache), storage(v_cache)):
        cache[dst.long()] = cache[src.long()]


# --- attention -------------------------------------------------------------------------------------------------------------------


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """The tokens of blocks int[n, m] of a cache, in order: [n, Hkv, m·block_size, D], a copy."""
    n, m = blocks.shape
    _, heads, size, dim = cache.shape
    return storage(cache)[blocks].transpose(1, 2).reshape(n, heads, m * size, dim).view(cache.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """softmax(scale · q kᵀ, soft-capped) v over the tokens seen; rows that see nothing give zeros.

    q[..., R, D], k and v [..., S, D] in the arithmetic type; seen bool, broadcastable to [..., R, S]. v must be finite.
    """
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    return weights @ v


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
    """One query token per sequence against its paged KV. Returns [B, Hq, D].

    q[B, Hq, D]; block_table int32[max_rows, max_blocks]; rows int32[B] picks its rows; seq_lens int32[B] counts tokens, the
    current one included, and 0 marks a padding row, which gives zeros, -1 one whose place in `out` is left as it is, as it is written by
    another. window > 0: only the last `window` tokens are seen.
    """
    batch, num_heads, dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    blocks = max(-(-int(seq_lens.max()) // block_size), 1) if batch else 1
    token = torch.arange(blocks * block_size, device=q.device)
    lens = seq_lens.long().unsqueeze(1)
    seen = token < lens
    if window:
        seen &= token >= lens - window
    used = torch.arange(blocks, device=q.device) * block_size < lens
    table = block_table[rows.long(), :blocks].long().where(used, 0)
    hidden = ~seen[:, None, :, None]
    # Slots past the end may hold anything, NaN included, and 0 · NaN is NaN.
    k = from_cache(_gather(k_cache, table), k_scale, q).masked_fill_(hidden, 0.0)
    v = from_cache(_gather(v_cache, table), v_scale, q).masked_fill_(hidden, 0.0)
    grouped = _accurate(q).view(batch, num_kv_heads, num_heads // num_kv_heads, dim)
    result = _attend(grouped, k, v, seen[:, None, None, :], scale, softcap).reshape(batch, num_heads, dim)
    if out is not None:
        result = torch.where((seq_lens < 0)[:, None, None], out, result)
    return _give(result, out, q.dtype)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    max_query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """A chunk of query tokens per sequence against its paged KV, causally. Returns [T, Hq, D].

    q[T, Hq, D] holds the chunks end to end: sequence n owns query_start_loc[n] .. query_start_loc[n + 1] (int32[N + 1]).
    seq_lens int32[N] counts context and chunk, so the chunk's last token sits at position seq_lens[n] - 1. Tokens of q that no
    sequence owns are left alone in `out`, and are zeros where there is none. max_query_len bounds the chunk lengths.
    """
    del max_query_len  # only the launcher needs it, for its grid
    result = torch.zeros_like(q) if out is None else out
    group = q.shape[1] // k_cache.shape[1]
    starts, lens, row = query_start_loc.tolist(), seq_lens.tolist(), rows.tolist()
    for n, seq_len in enumerate(lens):
        begin, end = starts[n], starts[n + 1]
        if begin == end:
            continue
        blocks = block_table[row[n], : -(-seq_len // k_cache.shape[2])].long().unsqueeze(0)
        k, v = (
            from_cache(_gather(cache, blocks)[0, :, :seq_len], scales, q).repeat_interleave(group, 0)
            for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
        )
        query = torch.arange(seq_len - (end - begin), seq_len, device=q.device).unsqueeze(1)
        token = torch.arange(seq_len, device=q.device)
        seen = token <= query
        if window:
            seen &= token > query - window
        chunk = _accurate(q[begin:end]).transpose(0, 1)
        if softcap:
            attended = _attend(chunk, k, v, seen, scale, softcap)
        else:
            attended = F.scaled_dot_product_attention(chunk[None], k[None], v[None], attn_mask=seen, scale=scale)[0]
        result[begin:end] = attended.transpose(0, 1).to(q.dtype)
    return result


# --- ends of a step --------------------------------------------------------------------------------------------------------------


def gather_rows(rows: Tensor, scalars: Tensor, seeds: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What rows int32[B] hold: scalars int32[F, B], seeds int64[B], and where their next token goes: positions int32[B], slots int64[B].

    scalars int32[F, R], whose first field counts a row's tokens and whose second is the last of them; seeds int64[R]; table
    int32[R, blocks]. The last token is the one to compute: its position is count - 1, its slot block · block_size + offset, and a
    row without a token has position 0 and slot -1.
    """
    index = rows.long()
    gathered = scalars.index_select(1, index)
    positions = (gathered[0] - 1).clamp_(min=0)
    blocks = table[index, (positions // block_size).long()].long()
    slots = (blocks * block_size + positions % block_size).masked_fill_(gathered[0] == 0, -1)
    return gathered, seeds.index_select(0, index), positions, slots


def gather_padded(
    decode_rows: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, sample_rows: Tensor, sample_index: Tensor, scalars: Tensor,
    seeds: Tensor, table: Tensor, block_size: int, padding: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What a padded step needs of its rows, all int32: decode_rows[D] stand before the chunks' tokens, so token_ids[T] and positions[T],
    which hold those of the chunks, get the first places filled in, unless such a row is `padding`.

    Returns the decoding rows' counts int32[D], -1 of padding, whose places are chunks' tokens or nobody's, slots int64[T], where
    slots[T] has those of the chunks, and of sample_rows[M] scalars int32[F, M], seeds int64[M] and sample_index as int64[M]. The rest as
    in gather_rows.
    """
    last, _, known_positions, known_slots = gather_rows(decode_rows, scalars, seeds, table, block_size)
    real, places, all_slots = decode_rows != padding, len(decode_rows), slots.long()
    for sent, known in ((token_ids, last[1]), (positions, known_positions), (all_slots, known_slots)):
        sent[:places] = torch.where(real, known, sent[:places])
    gathered, drawn_seeds, _, _ = gather_rows(sample_rows, scalars, seeds, table, block_size)
    return torch.where(real, last[0], -1), all_slots, gathered, drawn_seeds, sample_index.long()


def finish_rows(drawn: Tensor, rows: Tensor, lengths: Tensor, scalars: Tensor, stops: Tensor, stop_flag: int, bad_flag: int) -> Tensor:
    """Move rows int32[B] past the tokens drawn int32[B] (-1: none could be). Returns int32[2, B]: tokens, -1 replaced by 0, and flags.

    lengths int32[B]: the rows' counts before; a row's count becomes one more in `scalars` (see gather_rows), unless it was 0, so
    doing it twice changes nothing. stop_flag marks tokens among the row's stops int32[R, S] (-1 fills up), bad_flag a -1.
    """
    index = rows.long()
    tokens = drawn.clamp(min=0)
    stopped = (stops.index_select(0, index) == tokens.unsqueeze(1)).any(1)
    flags = stopped * stop_flag + (drawn < 0) * bad_flag
    scalars[1].index_copy_(0, index, tokens)
    scalars[0].index_copy_(0, index, lengths + (lengths > 0))
    return torch.stack((tokens, flags.int()))


# --- sampling --------------------------------------------------------------------------------------------------------------------


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011). All words are int64 tensors holding 32 unsigned bits, broadcastable together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two 32-bit words wraps in int64 but keeps its 64 bits; the mask undoes the sign of the shift.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (high >> 32 & _MASK32) ^ c1 ^ k0, high & _MASK32, (low >> 32 & _MASK32) ^ c3 ^ k1, low & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, sequence: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float32[B, V]: the Gumbel noise of token v is a function of (seed, sequence, position, v) alone.

    Philox key: the seed's low and high words; counter: (position, sequence, v // 4, 0), word v % 4. Uniform
    u = (word >> 9 + ½)·2⁻²³ lies strictly between 0 and 1, and noise is -log(-log u).
    """
    quads = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    column = [x.long().unsqueeze(1) & _MASK32 for x in (positions, sequence, seeds, seeds.long() >> 32)]
    words = torch.stack(philox((column[0], column[1], quads, torch.zeros_like(quads)), (column[2], column[3])), -1)
    uniform = ((words.flatten(1)[:, :vocab_size] >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def keep_mask(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool[B, V]: the tokens that sampling may choose, given scaled[B, V] = logits / temperature.

    top_k (0 off): logits at least as large as the k-th largest. top_p (1 off): of those, the fewest most probable whose
    renormalised probability reaches top_p. min_p (0 off): probability at least min_p times the largest. Tokens that tie with
    the last one kept are kept too, so the set does not depend on order.
    """
    ordered = scaled.sort(-1, descending=True).values
    vocab = scaled.shape[1]
    k = top_k.long().where(top_k > 0, vocab).clamp(max=vocab)
    rank = torch.arange(vocab, device=scaled.device)
    in_k = ordered >= ordered.gather(1, (k - 1).unsqueeze(1))
    probs = torch.softmax(ordered.masked_fill(~in_k, -torch.inf), -1)
    before = probs.cumsum(-1) - probs
    in_p = in_k & ((before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1) | (rank == 0))
    cut = ordered.gather(1, in_p.sum(-1, keepdim=True) - 1)
    floor = ordered[:, :1] + torch.log(min_p).unsqueeze(1)
    return (scaled >= cut) & (scaled >= floor)


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
    """One token per row of logits[B, V]. Returns int32[B].

    temperature float32[B], below 1e-5 or with top_k 1 greedy (the largest logit, the lowest id on ties); top_k int32[B], top_p and
    min_p float32[B] as in `keep_mask`; seeds int64[B] holding 64 unsigned bits; sequence and positions int32[B]. Otherwise the
    token is argmax(logits / temperature + gumbel_noise) over the kept set. -1 where a row's largest logit is NaN or infinite.
    """
    wide = _accurate(logits)
    best, tokens = wide.max(-1)
    tokens = (wide == best.unsqueeze(1)).int().argmax(-1)  # the first of equals
    random = torch.nonzero((temperature >= GREEDY_BELOW) & (top_k != 1)).flatten()
    if random.numel():
        scaled = wide[random] / temperature[random].unsqueeze(1)
        limits = (top_k[random], top_p[random], min_p[random])
        if bool(((limits[0] > 0) | (limits[1] < 1) | (limits[2] > 0)).any()):
            scaled = scaled.masked_fill(~keep_mask(scaled, *limits), -torch.inf)
        noise = gumbel_noise(seeds[random], sequence[random], positions[random], logits.shape[1])
        tokens[random] = (scaled + noise).argmax(-1)
    return _give(tokens.where(best.isfinite(), -1), out, torch.int32)


def top_logprobs(logits: Tensor, tokens: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """log-softmax of logits[B, V]: of the tokens int32[B] → float32[B], and of the `num` largest → ids int32[B, num], float32[B, num].

    Largest first; of equals the lowest id first.
    """
    wide = _accurate(logits)
    norm = torch.logsumexp(wide, -1, keepdim=True)
    chosen = wide.gather(1, tokens.long().unsqueeze(1)) - norm
    ordered = wide.sort(stable=True, dim=-1, descending=True)
    return chosen.squeeze(1).float(), ordered.indices[:, :num].int(), (ordered.values[:, :num] - norm).float()
