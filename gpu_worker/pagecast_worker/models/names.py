"""How checkpoints name the parts of a model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """The index-th of `of` equal parts of a checkpoint tensor's rows: what a file with fused projections has for one of them."""

    name: str
    index: int
    of: int


Names = Mapping[str, str | Piece]
"""A model's mapping table: a part of a layer (or of the whole model) and the checkpoint's name for it. {e} stands for an expert."""
