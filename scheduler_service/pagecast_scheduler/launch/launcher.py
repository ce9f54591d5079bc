"""Where the processes of a cluster run. A launcher only places them: this host's supervisor starts what it is given and sees it die, and
the scheduler repairs what a death breaks, wherever it was."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pagecast_scheduler.launch.process import RoleSpec
from pagecast_scheduler.launch.run_dir import LaunchError


class Launcher(Protocol):
    """One way to spread a cluster over hosts."""

    def placed(self, specs: Sequence[RoleSpec]) -> list[RoleSpec]:
        """What this host's supervisor runs for a cluster of these processes. Raises LaunchError."""

    def held(self) -> AbstractContextManager[object]:
        """What has to be held while the cluster runs. Raises LaunchError on entering."""


class Local:
    """Every process on this host."""

    def placed(self, specs: Sequence[RoleSpec]) -> list[RoleSpec]:
        return list(specs)

    def held(self) -> AbstractContextManager[object]:
        return nullcontext()


class Static:
    """The same command on each of `nnodes` hosts; host `node_rank` runs its equal share of the ranks, host 0 everything else too.

    Compose, Slurm and Kubernetes start it so. Ranks find the scheduler at one address, and each other through it.
    """

    def __init__(self, nnodes: int, node_rank: int, head: str | None) -> None:
        """Raises LaunchError."""
        if nnodes < 1:
            raise LaunchError(f"nnodes must be at least 1, not {nnodes}")
        if not 0 <= node_rank < nnodes:
            raise LaunchError(f"node_rank must be below nnodes {nnodes}, not {node_rank}")
        if nnodes > 1 and head is None:
            raise LaunchError("head is needed: the host:port where ranks of all hosts reach the scheduler")
        self._nnodes, self._node_rank = nnodes, node_rank

    def placed(self, specs: Sequence[RoleSpec]) -> list[RoleSpec]:
        ranks = sum(spec.role == "worker" for spec in specs)
        if ranks % self._nnodes:
            raise LaunchError(f"nnodes must divide tensor_parallel_size, got {self._nnodes} for {ranks}")
        share = ranks // self._nnodes
        mine = range(self._node_rank * share, (self._node_rank + 1) * share)
        return [spec for spec in specs if (spec.index in mine if spec.role == "worker" else self._node_rank == 0)]

    def held(self) -> AbstractContextManager[object]:
        return nullcontext()
