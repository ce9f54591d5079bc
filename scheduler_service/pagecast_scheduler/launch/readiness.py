"""What the run directory tells about a starting cluster: loading progress of workers, addresses and readiness of front ends."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagecast_scheduler.launch.events import Loading
from pagecast_scheduler.launch.process import RoleSpec


class Readiness:
    """Reads the files that roles publish; remembers what was already told."""

    def __init__(self, folder: Path, specs: Sequence[RoleSpec]) -> None:
        self._folder = folder
        self._frontends = sorted(spec.index for spec in specs if spec.role == "frontend")
        self._gateways = [spec.name for spec in specs if spec.role == "gateway"]
        self._ranks = sorted(spec.index for spec in specs if spec.role == "worker")
        self._told: dict[int, Loading] = {}

    def loading(self) -> Iterator[Loading]:
        """Progress that is new since the last call."""
        for rank in self._ranks:
            try:
                fields = json.loads((self._folder / f"worker-{rank}.progress").read_bytes())
            except (OSError, ValueError):
                continue
            news = Loading(rank, str(fields["phase"]), int(fields["done"]), int(fields["total"]))
            if self._told.get(rank) != news:
                self._told[rank] = news
                yield news

    def _is_loaded(self, rank: int) -> bool:
        news = self._told.get(rank)
        return news is not None and news.phase == "warm-up" and news.done >= news.total

    def addresses(self) -> tuple[str, ...] | None:
        """Where the front ends listen, and after them the gateway, once every one of them serves; None before.

        Of a host that has nothing but ranks: (), once all of them have loaded.
        """
        if not self._frontends and not all(self._is_loaded(rank) for rank in self._ranks):
            return None
        found = []
        for index in self._frontends:
            try:
                address = (self._folder / f"frontend-{index}.address").read_text().strip()
            except OSError:
                return None
            if not address or not (self._folder / f"frontend-{index}.serving").exists():
                return None
            found.append(address)
        for name in self._gateways:
            try:
                found.append((self._folder / f"{name}.address").read_text().strip())
            except OSError:
                return None
        return tuple(found)

    def forget(self, spec: RoleSpec) -> None:
        """A process ended: what it published is not true any more."""
        for suffix in ("address", "serving", "progress"):
            (self._folder / f"{spec.name}.{suffix}").unlink(missing_ok=True)
        if spec.role == "worker":
            self._told.pop(spec.index, None)
