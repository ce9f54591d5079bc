"""The child process that checks constraints, and the callers who wait for it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pagecast_scheduler.frontend import constraint_checker
from pagecast_scheduler.frontend.constraint_checker import ConstraintChecker
from pagecast_scheduler.frontend.errors import Refusal
from pagecast_wire.sampling import Constraint, ConstraintKind


@pytest.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    made = ConstraintChecker()
    yield made
    await made.close()


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


async def test_a_schema_may_be_a_boolean(checker: ConstraintChecker) -> None:
    anything = Constraint(ConstraintKind.JSON_SCHEMA, " true\n")
    assert await checker.check(anything, "path") == anything
    with pytest.raises(Refusal) as caught:
        await checker.check(Constraint(ConstraintKind.JSON_SCHEMA, "false"), "path")
    assert "Unsatisfiable" in caught.value.violations[0].description


async def leave(caller: "asyncio.Task[Constraint | None]") -> None:
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_a_caller_that_leaves_does_not_take_the_child_with_it(checker: ConstraintChecker) -> None:
    """It takes longer to start than some deadlines: callers who have them would never be served."""
    impatient = asyncio.create_task(checker.check(regex("a"), "path"))
    while checker._child is None:
        await asyncio.sleep(0)
    child = checker._child
    waiting = asyncio.create_task(checker.check(regex("b"), "path"))
    await asyncio.sleep(0)
    await leave(impatient)
    await leave(waiting)  # its turn never comes
    assert await checker.check(regex("c"), "path") == regex("c")
    assert checker._child is child and child.poll() is None
    assert len(checker._good) == 2, "what was under way was checked to its end, what waited was not"
    assert checker._num_waiting == 0


async def test_what_takes_too_long_is_refused_and_the_next_is_served(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await checker.check(regex("a"), "path") == regex("a")
    child = checker._child
    monkeypatch.setattr(constraint_checker, "MAX_SECONDS", 0.0)
    with pytest.raises(Refusal) as caught:
        await checker.check(regex("b"), "path")
    assert "takes more than" in caught.value.violations[0].description
    monkeypatch.undo()
    assert await checker.check(regex("b"), "path") == regex("b")
    assert checker._child is not child
