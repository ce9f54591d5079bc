"""Where a recorded run's time went, step by step: how long the device took, and how much later than that results came.

Owns the kinds that steps are counted by; `pagecast replay --times` prints them.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from pagecast_scheduler.engine.replay import RecordingError, read
from pagecast_wire.codec import WIRE_DIGEST, decode, view_u32
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import StepResult

BOUNDS = (1, 4, 16, 64, 128, 192, 255, 256, 512, 1024, 4096, 16384)
"""Sizes of steps, sampling rows or prompt tokens, at which one line of the table ends."""


@dataclass(slots=True)
class Kind:
    """Steps alike in what they compute. Sums over them: rows that sampled and prompt tokens; microseconds of the device, and between a
    step's result and the one before it, or the plan where that is later."""

    num_plans: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    device_us: int = 0
    elapsed_us: int = 0


@dataclass(slots=True)
class StepTimes:
    """kinds: by (whether steps have prefill, the bound that holds their size). idle_us: when no plan was under way, between the first plan
    and the last result."""

    kinds: dict[tuple[bool, int], Kind] = field(default_factory=lambda: defaultdict(Kind))
    idle_us: int = 0


def step_times(path: str | Path) -> StepTimes:
    """Raises RecordingError or OSError."""
    entries = read(path)
    _, kind, header = next(entries, (0, "", {}))
    if kind != "header" or header.get("wire_digest") != WIRE_DIGEST:
        raise RecordingError("the recording has no header of this build")
    times = StepTimes()
    planned: dict[tuple[int, int], tuple[int, StepPlan]] = {}
    last: int | None = None
    try:
        for at, kind, body in entries:
            if kind == "plan":
                plan: StepPlan = decode(body, "to_worker")
                planned[plan.epoch, plan.step] = at, plan
            elif kind == "result":
                result: StepResult = decode(body, "from_worker")
                if (made := planned.pop((result.epoch, result.step), None)) is not None:
                    times.idle_us += max(0, made[0] - last) if last is not None else 0
                    _count(times, made[1], result, at - max(made[0], last or 0))
                    last = at
    except (ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"an entry is damaged: {type(error).__name__}") from None
    return times


def _count(times: StepTimes, plan: StepPlan, result: StepResult, elapsed_us: int) -> None:
    rows, tokens = len(result.flags) // plan.num_steps, int(view_u32(plan.chunk_lengths).sum())
    size = tokens or rows
    kind = times.kinds[tokens > 0, next((bound for bound in BOUNDS if bound >= size), BOUNDS[-1] + 1)]
    kind.num_plans += 1
    kind.num_rows += rows
    kind.num_prompt_tokens += tokens
    kind.device_us += result.device_us
    kind.elapsed_us += elapsed_us


def table(times: StepTimes) -> list[str]:
    """Lines for people, the kinds in the order of their size, and the sum of all."""
    lines = [f"{'steps of':<26}{'plans':>8}{'rows':>9}{'prompt':>9}{'device ms':>11}{'elapsed ms':>12}{'total s':>9}{'device':>8}"]
    everything = Kind()
    for (has_prefill, bound), kind in sorted(times.kinds.items()):
        lines.append(_line(_name(has_prefill, bound), kind))
        for name in Kind.__slots__:
            setattr(everything, name, getattr(everything, name) + getattr(kind, name))
    lines.append(_line("all", everything))
    return [*lines, f"nothing under way: {times.idle_us / 1e6:.3f} s"]


def _name(has_prefill: bool, bound: int) -> str:
    """Of a line: "17 to 64 rows", "1 row", "over 16384 prompt tokens"."""
    place = BOUNDS.index(bound) if bound in BOUNDS else len(BOUNDS)
    least = BOUNDS[place - 1] + 1 if place else 0
    size = f"over {BOUNDS[-1]}" if place == len(BOUNDS) else str(bound) if least in (0, bound) else f"{least} to {bound}"
    return f"{size} {'prompt token' if has_prefill else 'row'}{'' if size == '1' else 's'}"


def _line(name: str, kind: Kind) -> str:
    count, elapsed = max(kind.num_plans, 1), max(kind.elapsed_us, 1)
    return (
        f"{name:<26}{kind.num_plans:>8}{kind.num_rows / count:>9.1f}{kind.num_prompt_tokens / count:>9.1f}"
        f"{kind.device_us / count / 1e3:>11.3f}{kind.elapsed_us / count / 1e3:>12.3f}{kind.elapsed_us / 1e6:>9.3f}"
        f"{kind.device_us / elapsed:>8.1%}"
    )
