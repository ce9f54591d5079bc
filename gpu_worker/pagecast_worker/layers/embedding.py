"""Token embedding and output head, split over ranks by vocabulary."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
    """weight[V / size, H]; the embedding's own tensor where the two are tied."""

    weight: Tensor
    ranks: Ranks

    def forward(self, ops: Any, hidden: Tensor) -> Tensor:
        """[B, H] -> logits [B, V], every rank the same."""
        return self.ranks.all_gather(ops.linear(hidden, self.weight))
