"""Which ranks have compiled the constraints that they were asked for. A constraint may be asked for again while a rank still owes an answer
to the time before, so answers are counted: a rank's second is to what was asked second."""

from collections.abc import Collection
from dataclasses import dataclass, field

from pagecast_wire.sampling import ConstraintFault


@dataclass(slots=True)
class _Answers:
    """num: by rank. settled: of how many times asked the outcome is known."""

    num: dict[int, int] = field(default_factory=dict)
    settled: int = 0


class Preparing:
    """By digest, while some rank has yet to answer. One epoch's: the next one's group has compiled nothing."""

    def __init__(self) -> None:
        self._answers: dict[bytes, _Answers] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> None:
        """The group is gone."""
        self._answers.clear()

    def answered(self, digest: bytes, rank: int, fault: int, ranks: Collection[int]) -> bool:
        """A rank of `ranks` has answered. Whether that settles the matter: all have compiled it, or this one is the first that cannot."""
        known = self._answers.setdefault(digest, _Answers())
        which = known.num[rank] = known.num.get(rank, 0) + 1
        counts = [known.num.get(one, 0) for one in ranks]
        settles = which > known.settled and (fault != ConstraintFault.NONE or min(counts) >= which)
        if settles:
            known.settled = which
        if min(counts) == max(counts):
            del self._answers[digest]
        return settles
