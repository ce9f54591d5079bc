"""Which processes are there and hang. Workers are not asked: the scheduler knows what they owe it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pagecast_scheduler.launch.process import Child
from pagecast_wire.pulse import last_beat

HUNG_S: Final = 20.0
"""Without a sign of life for so long, a scheduler or front end is given up. Its loop comes round at least every second."""
LOOK_S: Final = 1.0


class Pulses:
    """Looks once in LOOK_S. Times are monotonic seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked: float | None = None
        self._since = 0.0  # silence before this is forgiven
        self.next_look = 0.0

    def hung(self, children: Iterable[Child], now: float) -> list[tuple[Child, float]]:
        """Processes to give up, with the seconds that they have been silent. None where it is not time to look yet."""
        if now < self.next_look:
            return []
        if self._looked is None or now - self._looked > 2 * LOOK_S:
            self._since = now  # this process was stopped, or the machine was: nobody else was silent
        self._looked, self.next_look = now, now + LOOK_S
        found = []
        for child in children:
            beat = last_beat(str(self._folder / f"{child.spec.name}.pulse"))
            if beat is None or beat < child.started:
                continue  # it has not begun, or the file is of the process before it
            silent = now - max(beat, self._since)
            if silent > HUNG_S:
                found.append((child, silent))
        return found
