"""What a supervisor tells whoever started it, in the order in which it happens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """A process runs."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A process ended. code is negative for a signal; restart_in_s is None when it is not started again."""

    name: str
    pid: int
    code: int
    restart_in_s: float | None


@dataclass(frozen=True, slots=True)
class ChildHung:
    """A process gave no sign of life for so many seconds, and is killed; its end follows."""

    name: str
    pid: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a rank's start is: `done` of `total` in a phase of pagecast_wire.intake.LoadProgress."""

    rank: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Every front end serves; where each listens, in the order of their numbers."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stopping:
    """These processes were told to end."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The cluster ends by itself, with this exit code. line: what the process that caused it wrote last."""

    name: str
    exit_code: int
    line: str


Event = ChildStarted | ChildExited | ChildHung | Loading | Ready | Stopping | Failed
