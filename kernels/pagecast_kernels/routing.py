"""How a mixture of experts chooses among them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """chosen: experts per token. sigmoid: scores are sigmoids of logits, not their softmax. renormalise: chosen weights are divided
    by their sum; scale: then multiplied by it. groups, chosen_groups: experts lie in that many equal groups, and only those of the
    best chosen_groups may be chosen; a group's score is the sum of its group_top (1 or 2) best.
    """

    chosen: int
    sigmoid: bool = False
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_top: int = 1
