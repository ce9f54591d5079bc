"""Token embedding and output head, split over ranks by vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pagecast_worker.layers.quantized import Weight
from pagecast_worker.parallel import Ranks


@dataclass(slots=True)
class Embedding:
    """weight[V / size, H]: rows of tokens from `start` on."""

    weight: Tensor
    start: int
    ranks: Ranks

    def forward(self, ops: Any, token_ids: Tensor) -> Tensor:
        """int32[T] -> [T, H]."""
        return self.ranks.all_reduce(ops.embedding(token_ids, self.weight, start=self.start))


@dataclass(slots=True)
class Head:
    """weight[V / size, H]; the embedding's own tensor where the two are tied. The last rank may hold fewer rows than the others."""

    weight: Weight
    vocab_size: int
    ranks: Ranks

    def forward(self, ops: Any, hidden: Tensor) -> Tensor:
        """[B, H] -> logits [B, V], every rank the same."""
        return self.whole(self.local(ops, hidden))

    def local(self, ops: Any, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, H] -> logits [B, V / size] of this rank's tokens."""
        return ops.linear(hidden, self.weight, out=out)  # type: ignore[no-any-return]

    def whole(self, local: Tensor) -> Tensor:
        """Every rank's logits [B, V / size] -> [B, V]."""
        lacking = self.ranks.vocabulary_share(self.vocab_size) - local.shape[1]
        gathered = self.ranks.all_gather(F.pad(local, (0, lacking)) if lacking else local)
        return gathered[:, : self.vocab_size] if gathered.shape[1] > self.vocab_size else gathered
