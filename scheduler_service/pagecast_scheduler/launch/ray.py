"""Ranks over the hosts of a Ray cluster. Ray Core only places them and tells of their end: every byte of serving goes over our own links.

One placement group holds a bundle for each rank. For each rank the supervisor runs a small process of this module here, which starts an
actor in the rank's bundle, passes on what the rank writes, and ends with the rank's exit code; so deaths and restarts are the supervisor's
as ever. The actor keeps the rank as a process of its own, as pagecast starts it anywhere.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Final

from pagecast_scheduler.launch import ray_door
from pagecast_scheduler.launch.process import Lifeline, RoleSpec
from pagecast_scheduler.launch.run_dir import LaunchError
from pagecast_wire.lifeline import die_with_parent

ADDRESS: Final = "RAY_ADDRESS"
_GROUP: Final = "PAGECAST_RAY_GROUP"
_PLACE_S: Final = 120.0
_POLL_S: Final = 0.5


class OverRay:
    """The launcher. `held` connects to the cluster that RAY_ADDRESS names, if that is none that anybody may use, and keeps the placement
    group."""

    def __init__(self, ranks: int, device: str, head: str | None) -> None:
        """Raises LaunchError: ray is not installed, no head."""
        if find_spec("ray") is None:  # imported later: it reads how to authenticate once
            raise LaunchError("the ray launcher needs the package ray; install it with: pip install 'pagecast[ray]'")
        if head is None:
            raise LaunchError("head is needed: the host:port where ranks of all hosts reach the scheduler")
        self._ranks, self._needs_gpu = ranks, device != "cpu"

    def placed(self, specs: Sequence[RoleSpec]) -> list[RoleSpec]:
        return [
            RoleSpec("worker", [sys.executable, "-m", __name__, str(spec.index), *spec.argv], spec.index, spec.grace_s)
            if spec.role == "worker" else spec
            for spec in specs
        ]

    def held(self) -> AbstractContextManager[object]:
        return _placement(self._ranks, self._needs_gpu)


def _address() -> str:
    """Raises LaunchError."""
    address = os.environ.get(ADDRESS, "")
    if not address:
        raise LaunchError(f"the ray launcher needs the address of a running cluster in {ADDRESS}")
    return address


def _connect(address: str) -> Any:
    """Join the cluster as a driver. Raises LaunchError."""
    import ray

    try:
        ray.init(address, namespace="pagecast", log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LaunchError(f"cannot reach the Ray cluster at {address}: {str(error).splitlines()[0]}") from None
    return ray


@contextmanager
def _joined(address: str) -> Iterator[Any]:
    """As a driver of a cluster that lets in nobody but its own, or that nobody else reaches. Raises LaunchError."""
    asks_for_token = ray_door.check(address)
    ray = _connect(address)
    try:
        if not asks_for_token:
            ray_door.check_hosts(address, [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]])
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _placement(ranks: int, needs_gpu: bool) -> Iterator[None]:
    with _joined(ray_door.seen_by_ray(_address())) as ray:
        from ray.util import placement_group, remove_placement_group

        name = f"pagecast-{os.getpid()}"
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if needs_gpu and ray.cluster_resources().get("GPU") else {})
        group = placement_group([bundle] * ranks, strategy="PACK", name=name)
        try:
            if not group.wait(_PLACE_S):
                raise LaunchError(f"the Ray cluster has no room for {ranks} ranks with {bundle} each")
            os.environ[_GROUP] = name
            yield
        finally:
            remove_placement_group(group)


class RankHolder:
    """What the actor runs: one rank as a child process, which does not outlive the actor's. `news` and `stop` may overlap."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = [sys.executable, *argv[1:]]
        self._life = Lifeline()
        self._lines: list[str] = []
        self._spawned = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        self._spawned.wait()

    def _keep(self) -> None:
        """Spawns and reads, in one thread: a child is tied to the thread that spawned it, and those of calls come and go."""
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self._life.environment(), pass_fds=(self._life.reader,),
        )
        self._spawned.set()
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.append(line)
        self._process.wait()

    def news(self, wait_s: float) -> tuple[list[str], int | None]:
        """Lines written since the last call, and the exit code once there is one. Waits up to wait_s for the end."""
        try:
            code: int | None = self._process.wait(wait_s)
            self._keeper.join(1.0)
        except subprocess.TimeoutExpired:
            code = None
        lines, self._lines = self._lines, []
        return lines, code

    def stop(self, number: int) -> None:
        self._process.send_signal(number)


def main(arguments: list[str]) -> int:
    """`RANK ARGV...`: hold this rank in the cluster until it ends; its exit code."""
    die_with_parent()
    rank, argv = int(arguments[0]), arguments[1:]
    try:
        ray = _connect(_address())
    except LaunchError as error:
        print(f"pagecast worker: {error}", file=sys.stderr)
        return error.exit_code
    from ray.util import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_placement_group(os.environ[_GROUP])
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    needs_gpu = "GPU" in group.bundle_specs[rank]
    holder = ray.remote(RankHolder).options(
        num_cpus=1, num_gpus=1 if needs_gpu else 0, max_concurrency=2, max_restarts=0, scheduling_strategy=where
    ).remote(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: holder.stop.remote(number) and None)
    return _follow(ray, holder)


def _follow(ray: Any, holder: Any) -> int:
    """Pass on what the rank writes until it ends."""
    while True:
        try:
            lines, code = ray.get(holder.news.remote(_POLL_S))
        except ray.exceptions.RayActorError:
            print("pagecast worker: the host of this rank was lost", file=sys.stderr)
            return 1
        for line in lines:
            sys.stderr.write(line)
        sys.stderr.flush()
        if code is not None:
            return int(code) if code >= 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
