"""What the worker loop asks of whatever executes plans: the torch executor, or the oracle.

An executor never decides anything: it applies plans in order and reports what they produced.
"""

from collections.abc import Callable
from typing import Protocol

from pagecast_wire.intake import LoadProgress, ModelFacts
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault

ReportProgress = Callable[[LoadProgress], None]
Prepared = Callable[[bytes, ConstraintFault], None]


class OutOfMemory(RuntimeError):
    """The device ran out of memory in a step; reported to the scheduler as such."""


class LoadError(RuntimeError):
    """The model cannot be loaded. The text is one line for the operator and names the file and the tensor or field."""


class Stopped(Exception):
    """This rank was told to stop while it was loading."""


class PlanError(ValueError):
    """A plan contradicts this rank's state or limits: the two sides' block tables have parted. The text names the row or step."""


class Executor(Protocol):
    """Executes plans in order on one stream.

    Life: load once, then for each epoch start_epoch followed by submit/collect. submit must not wait for the device where
    the device works asynchronously; collect returns results in the order of the plans.
    """

    def load(self, report: ReportProgress) -> tuple[ModelFacts, int]:
        """Load weights, size the pool, warm up. Returns the model's facts and how many blocks the pool holds (null block included).

        Raises LoadError."""

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Once loaded: see WorkerHello. Empty where every number of tokens costs what it is."""

    def start_epoch(self, start: StartEpoch) -> None:
        """Forget every row and every KV block."""

    def prepare(self, constraint: Constraint, done: Prepared) -> None:
        """Compile a constraint aside; done is called once, from any thread, with its digest and what is wrong with it."""

    def submit(self, plan: StepPlan) -> None:
        """Apply the plan and enqueue its step(s). Raises PlanError, OutOfMemory."""

    def collect(self, wait: bool) -> StepResult | None:
        """The oldest result not yet collected; None if there is none, or if it is not ready and `wait` is false."""

    def close(self) -> None:
        """Release the device. No call may follow."""
