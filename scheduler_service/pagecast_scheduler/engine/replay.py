"""Runs a recording through the scheduler core again, without workers, and says where the plans differ first.

Owns reading of the file, the comparison and the timeline; `pagecast replay` prints what it returns.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.recovery import Loss
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.core.state import ResultError
from pagecast_scheduler.engine.recorder import LENGTH, MAGIC, count_of
from pagecast_wire.codec import WIRE_DIGEST, WireError, decode, view_u32
from pagecast_wire.intake import Abort, Pause, StopAt, Submit
from pagecast_wire.plan import StepPlan
from pagecast_wire.sampling import FinishReason


class RecordingError(ValueError):
    """The file is not a recording of this build; the text is one line and names what is wrong."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the core does something else than it did. field: of StepPlan; "plan" if there is one on one side only."""

    epoch: int
    step: int
    field: str
    recorded: str
    now: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One step on the timeline. Times are microseconds since the first entry. num_waiting: -1 where it cannot be known."""

    at: int
    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_preemptions: int


@dataclass(slots=True)
class Replay:
    """What came of a recording. compared: whether it held the token ids without which plans cannot be made again."""

    compared: bool
    num_blocks: int = 0
    num_plans: int = 0
    num_results: int = 0
    num_requests: int = 0
    difference: Difference | None = None
    timeline: list[Moment] = field(default_factory=list)


def read(path: str | Path) -> Iterator[tuple[int, str, Any]]:
    """(microseconds, kind, body) of every whole frame. Raises RecordingError, or OSError if the file cannot be read."""
    decoder = msgspec.msgpack.Decoder(tuple[int, str, Any])
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError("this is not a Pagecast recording")
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            frame = file.read(size)
            if len(frame) < size:
                return
            try:
                yield decoder.decode(frame)
            except msgspec.MsgspecError:
                raise RecordingError(f"damaged {size} bytes before offset {file.tell()}") from None


def replay(path: str | Path) -> Replay:
    """Run a recording again up to the first difference. Raises RecordingError or OSError."""
    entries = read(path)
    first: tuple[int, str, Any] = next(entries, (0, "", {}))
    _, kind, header = first
    if kind != "header":
        raise RecordingError("the recording has no header")
    if header.get("wire_digest") != WIRE_DIGEST:
        raise RecordingError(f"recorded by a build with wire digest {header.get('wire_digest')}, this one has {WIRE_DIGEST}")
    result = Replay(compared=bool(header.get("with_tokens")))
    try:
        if result.compared:
            _run_again(entries, result)
        else:
            _only_look(entries, result)
    except RecordingError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"an entry is damaged: {type(error).__name__}") from None
    return result


def _run_again(entries: Iterator[tuple[int, str, Any]], result: Replay) -> None:
    """Feed a core with every recorded input and compare its plans."""
    scheduler: Scheduler | None = None
    began: int | None = None
    earlier = 0  # preemptions of schedulers before this one
    for at, kind, body in entries:
        began = at if began is None else began
        if kind == "create":
            earlier += scheduler.stats().num_preemptions if scheduler is not None else 0
            scheduler = Scheduler(_config(body["config"]), epoch=body["epoch"])
            result.num_blocks = body["config"]["num_blocks"]
        elif scheduler is None:
            raise RecordingError(f"an entry {kind!r} comes before any scheduler")
        elif kind in ("plan", "no_plan"):
            recorded = decode(body, "to_worker") if kind == "plan" else None
            made = scheduler.plan_step(at)
            scheduler.take_batches()
            result.difference = compare(recorded, made)
            if result.difference is not None:
                return
            if made is not None:
                result.num_plans += 1
                result.timeline.append(_moment(scheduler, at - began, made.step, earlier))
        else:
            _feed(scheduler, at, kind, body, result)


def _config(values: dict[str, Any]) -> SchedulerConfig:
    return SchedulerConfig(**values | {"step_sizes": tuple(values["step_sizes"])})


def _moment(scheduler: Scheduler, at: int, step: int, earlier: int) -> Moment:
    stats = scheduler.stats()
    return Moment(at, step, stats.num_running, stats.num_waiting, stats.num_blocks_referenced, earlier + stats.num_preemptions)


def _feed(scheduler: Scheduler, at: int, kind: str, body: Any, result: Replay) -> None:
    """One input other than an attempt to plan."""
    match kind:
        case "arrival":
            _arrive(scheduler, at, decode(body, "from_frontend"), result)
        case "result":
            result.num_results += 1
            with suppress(ResultError):  # as in the recorded run, where it cost the worker group its epoch
                scheduler.apply_result(decode(body, "from_worker"), at)
        case "start_epoch":
            scheduler.start_epoch()
        case "fail_epoch":
            scheduler.fail_epoch(at, Loss(body.get("loss", Loss.CRASH)))
        case "constraint_prepared":
            scheduler.constraint_prepared(bytes.fromhex(body["digest"]), body["fault"], at)
        case "drop_frontend":
            scheduler.drop_frontend(body["slot"], at, body.get("spared", ()))
        case "abort":
            scheduler.abort(body["key"], at, FinishReason(body.get("reason", FinishReason.CANCELLED)))
        case "expire":
            scheduler.expire(at)
        case "reset_prefix_cache":
            scheduler.reset_prefix_cache()
        case _:
            raise RecordingError(f"unknown entry {kind!r}")


def _arrive(scheduler: Scheduler, at: int, message: Any, result: Replay) -> None:
    match message:
        case Submit():
            result.num_requests += 1
            with suppress(WireError, ValueError):  # as in the recorded run, where it was refused as malformed
                scheduler.submit(message, at)
        case Abort(keys=keys):
            for key in keys:
                scheduler.abort(key, at)
        case StopAt(key=key, sequence=sequence, keep=keep):
            scheduler.stop_at(key, sequence, keep, at)
        case Pause(key=key, paused=paused):
            scheduler.pause(key, paused, at)
        case _:
            raise RecordingError(f"{type(message).__name__} is not an arrival")


def compare(recorded: StepPlan | None, made: StepPlan | None) -> Difference | None:
    """The first field that differs, in the order of the struct; None if the plans are equal."""
    if recorded is None or made is None:
        if recorded is made:
            return None
        plan = recorded or made
        assert plan is not None
        return Difference(plan.epoch, plan.step, "plan", "a plan" if recorded else "none", "a plan" if made else "none")
    for name in StepPlan.__struct_fields__:
        before, after = getattr(recorded, name), getattr(made, name)
        if before != after:
            ids = name == "forced_tokens"
            return Difference(recorded.epoch, recorded.step, name, *(_show(count_of(v) if ids else v) for v in (before, after)))
    return None


def _show(value: Any) -> str:
    """A field for people: columns as numbers, admissions by row, length, hit and blocks; never token ids."""
    if isinstance(value, bytes):
        return str(view_u32(value).tolist())
    if isinstance(value, tuple):
        shown = [f"row {a.row}: {len(a.tokens) // 4} tokens, {a.num_computed_tokens} computed, blocks {_show(a.blocks)}" for a in value]
        return "; ".join(shown) or "none"
    return str(value)


def _only_look(entries: Iterator[tuple[int, str, Any]], result: Replay) -> None:
    """Without token ids: the timeline as the recorded plans show it."""
    tables: dict[int, set[int]] = {}
    began: int | None = None
    preemptions = 0
    for at, kind, body in entries:
        began = at if began is None else began
        if kind == "create":
            result.num_blocks = body["config"]["num_blocks"]
        if kind in ("create", "fail_epoch"):
            tables.clear()
        result.num_requests += kind == "arrival" and isinstance(decode(body, "from_frontend"), Submit)
        result.num_results += kind == "result"
        if kind != "plan":
            continue
        plan: StepPlan = decode(body, "to_worker")
        for row in view_u32(plan.released).tolist():
            tables.pop(row, None)
        for admission in plan.admissions:
            tables[admission.row] = set(view_u32(admission.blocks).tolist())
            preemptions += int(view_u32(admission.tokens)[0]) > admission.num_prompt_tokens
        for row, block in zip(view_u32(plan.grown_rows).tolist(), view_u32(plan.grown_blocks).tolist(), strict=True):
            tables[row].add(block)
        result.num_plans += 1
        used = len(set().union(*tables.values()))
        result.timeline.append(Moment(at - began, plan.step, len(tables), -1, used, preemptions))


def draw(result: Replay, picture: str | Path) -> None:
    """The timeline as a PNG: block use, running and waiting, preemptions over plans. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(result.timeline) + 1)
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    blocks, sequences, preemptions = figure.subplots(3, 1, sharex=True)
    blocks.fill_between(steps, [m.num_blocks for m in result.timeline], step="mid", color="tab:blue", alpha=0.5)
    blocks.axhline(max(result.num_blocks - 1, 0), color="tab:red", linewidth=1, label="pool")
    blocks.set_ylabel("blocks referenced")
    blocks.legend(loc="upper right")
    sequences.step(steps, [m.num_running for m in result.timeline], where="mid", label="running")
    if any(m.num_waiting >= 0 for m in result.timeline):
        sequences.step(steps, [m.num_waiting for m in result.timeline], where="mid", label="waiting")
    sequences.set_ylabel("sequences")
    sequences.yaxis.set_major_locator(MaxNLocator(integer=True))
    sequences.legend(loc="upper right")
    preemptions.step(steps, [m.num_preemptions for m in result.timeline], where="mid", color="tab:orange")
    preemptions.set_ylabel("preemptions, total")
    preemptions.set_xlabel("plan")
    figure.suptitle(f"{result.num_requests} requests, {result.num_plans} plans")
    figure.savefig(picture, format="png", dpi=110)
