"""Plain torch twin of `shard_sampling`, and how the ranks' answers become a token. Sampling without filters needs no more of a vocabulary
that is split over ranks than each rank's best: a maximum of maxima."""

import torch
from torch import Tensor

from pagecast_kernels.reference import GREEDY_BELOW, gumbel_noise

_LAST = 0x7FFFFFFF


def keys_of(scores: Tensor, ids: Tensor) -> Tensor:
    """int64 that order as float32 scores do, and among equal scores by falling id: their maximum is the best, the lowest id on ties."""
    bits = (scores + 0.0).view(torch.int32)  # of the two zeros, the one
    ordered = bits ^ (bits >> 31 & _LAST)
    return ordered.long() << 32 | (_LAST - ids).long()


def tokens_of(keys: Tensor) -> Tensor:
    """int32: the id in each key, -1 where the score is infinite."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ (ordered >> 31 & _LAST)).view(torch.float32)
    return (_LAST - (keys & _LAST)).int().where(scores.isfinite(), -1)


def best_of_shard(
    logits: Tensor, temperature: Tensor, top_k: Tensor, seeds: Tensor, sequence: Tensor, positions: Tensor, start: int
) -> Tensor:
    """int64[B] keys: the best token of logits[B, n], which are of ids from `start` on, a multiple of 4; see reference.sample, without
    top-k (but 1), top-p and min-p. The largest key over all shards holds the token that `sample` draws from the whole.

    A row with NaN or infinity among its logits has an infinite score.
    """
    wide = logits.float()
    ids = torch.arange(start, start + logits.shape[1], dtype=torch.int32, device=logits.device)
    scores = wide
    random = ((temperature >= GREEDY_BELOW) & (top_k != 1)).unsqueeze(1)
    if bool(random.any()):
        noise = gumbel_noise(seeds, sequence, positions, start + logits.shape[1])[:, start:]
        scores = torch.where(random, wide / temperature.unsqueeze(1).where(random, 1.0) + noise, wide)
    broken = (wide.isnan() | (wide == torch.inf)).any(1, keepdim=True)
    return keys_of(scores.masked_fill(broken, torch.inf), ids.expand_as(scores)).amax(1)
