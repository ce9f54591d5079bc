"""Executes plans on a real model: applies deltas, builds inputs, runs the forward pass, samples, and hands results back.

Owns the model, the KV pool and the rows' state. The same steps run on a CPU and on a GPU; what differs is in `backend` (operators,
staging, graphs).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog
import torch
from torch import Tensor

from pagecast_kernels.configs import UnsupportedError
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import LoadProgress, ModelFacts
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint
from pagecast_worker.backend import Backend, device_named
from pagecast_worker.batch_state import BatchState
from pagecast_worker.compilers import Compilers
from pagecast_worker.config import WorkerConfig
from pagecast_worker.constraints import ConstraintBook, Follower
from pagecast_worker.executor import LoadError, OutOfMemory, PlanError, Prepared, ReportProgress
from pagecast_worker.graphs import DecodeGraphs, buckets, warm_sizes
from pagecast_worker.group import Group, Meeting
from pagecast_worker.inputs import pack_mixed, sample_inputs, unpack_mixed
from pagecast_worker.kv_cache import KVCache
from pagecast_worker.loading.load import check_split, load_model, open_checkpoint, open_vocabulary
from pagecast_worker.memory import graph_reserve, logits_of_a_step, num_blocks_for, peak_step
from pagecast_worker.mixed_graphs import MixedGraphs, Size, sizes_for, worth_filling
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.outset import max_model_len
from pagecast_worker.parallel import Ranks
from pagecast_worker.precompile import start_precompilation
from pagecast_worker.results import Arrays, Kept, PromptPart, SubStep, build_result
from pagecast_worker.row_book import Int, RowBook, Schedule
from pagecast_worker.sampler import draw, follow_rules, prompt_logprobs, sample_rows
from pagecast_worker.sharing import sharing_for
from pagecast_worker.split_sampler import Filters
from pagecast_worker.staging import Download, Packet
from pagecast_worker.step_outputs import Decoded
from pagecast_worker.steps import decode_step, padded_step, try_sizes
from pagecast_worker.token_rules import Masks, StepRules, TokenRules

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Pending:
    """A plan under way, and what of it stays on the device until it comes down.

    decoded, wanted: its first step before its tokens are drawn by rules. followers: constraints of wanted.constrained; their masks need
    the tokens of the plan before, so drawing may wait for them while the forward pass runs. download: None until then. arrays: what
    came down. runs: forced tokens to tell of.
    """

    plan: StepPlan
    schedule: Schedule
    kept: Kept
    decoded: Decoded | None
    wanted: StepRules | None
    followers: list[Follower]
    download: Download | None = None
    arrays: Arrays | None = None
    device_us: int = 0
    runs: list[tuple[int, list[int]]] = field(default_factory=list)


class TorchExecutor:
    """See Executor. All methods are called from one thread."""

    def __init__(self, config: WorkerConfig, meeting: Meeting | None = None, compilers: Compilers | None = None) -> None:
        """meeting: how to find the other ranks, where there are any. compilers: started before torch was imported."""
        self._compilers = compilers
        self.config = config
        self.device = device_named(config.device, config.rank if config.tensor_parallel_size > 1 else None)
        if self.device.index is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # before anything can make a context on another one
        self._group = Group(config, self.device, meeting) if meeting is not None and config.tensor_parallel_size > 1 else None
        self._pending: deque[_Pending] = deque()
        self._book: RowBook | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self.step_sizes: tuple[int, ...] = ()

    # --- loading

    @torch.inference_mode()
    def load(self, report: ReportProgress) -> tuple[ModelFacts, int]:
        config = self.config
        self._report = report
        self._enter("device")
        checkpoint = open_checkpoint(config, self.device)
        shape, self.max_model_len = checkpoint.config, max_model_len(config, checkpoint.config)
        check_split(shape, Ranks(config.rank, config.tensor_parallel_size))
        if self._group is not None:
            self._group.meet(checkpoint.identity())
        self.backend = Backend(config, self.device, shape, self._group)
        self.dtype = self.backend.dtype
        self.kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        max_blocks = -(-self.max_model_len // config.block_size)
        ahead = start_precompilation(config, shape, checkpoint.scheme, self.dtype, max_blocks, self.device, self._compilers)
        try:
            ranks = self._group.ranks(shape.hidden_size, self.dtype) if self._group is not None else Ranks()
            loaded = load_model(config, checkpoint, ranks, self.device, self.dtype, report)
            self.model: Decoder = loaded.model
            self.backend.prepare(self.model)
            self.ops = self.backend.ops
            self.state = BatchState(config.max_num_seqs, max_blocks, self.device)
            self.logits = logits_of_a_step(config.max_num_seqs, self.model)
            self.rules = TokenRules(config.max_num_seqs, shape.vocab_size, self.device)
            self.filters = Filters(config.max_num_seqs)
            self.constraints = ConstraintBook(lambda: open_vocabulary(config, checkpoint), shape.vocab_size, shape.eos_token_ids)
            self._enter("kernels")
            if ahead is not None:
                ahead.wait()
            if self._group is not None:
                self._group.wait_for_all("weights")
            num_blocks = self._allocate()
            self._warm_up()
        except torch.OutOfMemoryError:
            raise LoadError(f"{config.model}: the model does not fit into the device's memory") from None
        except UnsupportedError as error:
            raise LoadError(f"{config.model}: {error}") from None
        return self._facts(shape, loaded.digest), num_blocks

    def _facts(self, shape: ModelConfig, digest: str) -> ModelFacts:
        config = self.config
        return ModelFacts(
            name=config.model,
            architecture=shape.architecture,
            digest=digest,
            vocab_size=shape.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=shape.eos_token_ids,
            dtype=str(self.dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_bytes_per_token=shape.block_bytes(1, self.kv_dtype.itemsize),
            num_parameters=self.model.num_parameters(),
            quantization=config.quantization or shape.quantization,
        )

    def _enter(self, phase: str) -> None:
        """Tells that this phase of loading begins."""
        self._report(LoadProgress(rank=self.config.rank, phase=phase, done=0, total=1))

    def _allocate(self) -> int:
        """Size the pool, from a peak step measured over a pool of two blocks, and allocate it."""
        shape, config = self.model.config, self.config
        bytes_per_block = shape.block_bytes(config.block_size, self.kv_dtype.itemsize, config.tensor_parallel_size)
        self.cache = self._cache(2)
        peak_step(self)
        self._enter("memory")
        later = {"of_rules": self.rules.state_bytes(), "for_graphs": graph_reserve(self)}
        num_blocks = num_blocks_for(config, self.device, bytes_per_block, lambda: peak_step(self), later)
        self.cache = self._cache(num_blocks)
        return num_blocks

    def _cache(self, num_blocks: int) -> KVCache:
        return KVCache(num_blocks, self.model.config.num_layers, self.model.kv_shape, self.config.block_size, self.device, self.kv_dtype)

    def _warm_up(self) -> None:
        """Run a decode step of every size that serving may use, and then as graphs where there are graphs."""
        self._enter("steps")
        try_sizes(self, warm_sizes(self.config.max_num_seqs) if self.backend.is_cuda else [1])

        def progress(done: int, total: int) -> None:
            self._report(LoadProgress(rank=self.config.rank, phase="warm-up", done=done, total=total))

        self._enter("warm-up")
        if self.backend.use_graphs:
            self._capture(progress)
        else:
            progress(1, 1)

    def _capture(self, progress: Callable[[int, int], None]) -> None:
        """Graphs of decode steps and of mixed ones, over one memory pool: at most one of them runs at a time."""
        config, padding = self.config, self.state.padding
        pool = torch.cuda.graph_pool_handle()
        decode, sizes = self.graph_sizes()
        mixed = MixedGraphs(partial(padded_step, self), sizes, padding, self.device)
        sharing = None if config.batch_invariant else sharing_for(self.model, self.dtype)
        graphs = DecodeGraphs(partial(decode_step, self), decode, padding, self.device, sharing)
        total = len(decode) + len(sizes)
        free, whole = torch.cuda.mem_get_info(self.device)
        try:
            graphs.capture(pool, lambda done, _: progress(done, total))
        except RuntimeError as error:
            why = f"decode steps could not be captured as graphs ({str(error).splitlines()[0]})"
            raise LoadError(f"{config.model}: {why}; a lower gpu_memory_utilization leaves them more memory") from None
        mixed.capture(pool, self.model.ranks.all_agree, lambda done, _: progress(len(decode) + done, total))
        left = torch.cuda.mem_get_info(self.device)[0]
        counts = {"decode": len(graphs.sizes), "shared": len(graphs.shared_sizes), "mixed": len(mixed.ready)}
        _log.info("graphs captured", **counts, mib=(free - left) >> 20, in_use=(whole - left) >> 20)
        self._graphs, self._mixed_graphs = graphs, mixed
        self.step_sizes = worth_filling(mixed.ready, self.model.parameters_of_a_token())

    def graph_sizes(self) -> tuple[list[int], list[Size]]:
        """Decode steps and steps with chunks that get a graph."""
        config, work = self.config, self.model.parameters_of_a_token()
        mixed = sizes_for(config.max_num_seqs, config.max_num_batched_tokens, work, self.backend.measured_products)
        return buckets(config.max_num_seqs, work), mixed

    # --- epochs and plans

    @torch.inference_mode()
    def start_epoch(self, start: StartEpoch) -> None:
        config = self.config
        for name, limit, value in (
            ("num_blocks", self.cache.num_blocks, start.num_blocks),
            ("max_num_seqs", config.max_num_seqs, start.max_num_seqs),
            ("max_model_len", self.max_model_len, start.max_model_len),
            ("max_num_batched_tokens", config.max_num_batched_tokens, start.max_num_batched_tokens),
        ):
            if value > limit:
                raise PlanError(f"epoch {start.epoch}: {name} must be at most {limit} on this rank, got {value}")
        if start.block_size != config.block_size:
            raise PlanError(f"epoch {start.epoch}: block_size must be {config.block_size} on this rank, got {start.block_size}")
        self.backend.synchronize()
        self._pending.clear()
        self.state.clear()
        self.rules.clear()
        self.constraints.clear()
        self._book = RowBook(start, self.state.max_blocks)

    def prepare(self, constraint: Constraint, done: Prepared) -> None:
        self.constraints.prepare(constraint, done)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        if self._book is None:
            raise PlanError(f"step {plan.step}: no epoch was started")
        try:
            if self._pending and self._pending[-1].download is None:
                self._finish(self._pending[-1])
            pending = self._begin(plan, self._book)
            self._pending.append(pending)
            if not pending.followers or all(earlier.download.ready() for earlier in self._pending if earlier.download is not None):
                self._finish(pending)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"step {plan.step}: {str(error).splitlines()[0]}") from None

    @torch.inference_mode()
    def collect(self, wait: bool) -> StepResult | None:
        if not self._pending:
            return None
        pending = self._pending[0]
        if pending.download is None:  # what it waited for was collected
            self._finish(pending)
        if pending.download is None or not (wait or pending.download.ready()):
            return None
        arrays = self._settle(self._pending.popleft())
        return build_result(pending.plan, self.config.rank, pending.kept, arrays, pending.device_us, pending.runs)

    def close(self) -> None:
        if self._group is None:  # else a step may never end, because another rank has
            self.backend.synchronize()
        self._pending.clear()
        self._graphs = self._mixed_graphs = None
        self.constraints.close()

    # --- one plan

    def _begin(self, plan: StepPlan, book: RowBook) -> _Pending:
        """Applies the plan and computes its first step up to the plain draw."""
        self.constraints.release(view_u32(plan.released).tolist())
        changes = book.apply(plan)
        schedule = book.schedule(plan)
        staging = self.backend.staging
        staging.begin()
        self.rules.admit(changes.admissions, staging)
        self.filters.admit(changes.admissions)
        self.constraints.admit(changes.admissions)
        packet = Packet()
        if schedule.forced is not None:
            self.rules.take(schedule.forced, staging)
        self.state.pack(changes, schedule.forced, packet)
        clears = self.backend.clear_blocks and len(changes.fresh_blocks) > 0
        for blocks in [changes.copy_from, changes.copy_to] if len(changes.copy_from) else []:
            packet.add(blocks)
        if clears:
            packet.add(changes.fresh_blocks)
        sent = self._pack_rows(schedule, book, packet)
        parts = packet.upload(staging)
        self.state.unpack(changes, schedule.forced, parts)
        if len(changes.copy_from):
            self.cache.copy(self.ops, parts.pop(0), parts.pop(0))
        if clears:
            self.cache.clear(parts.pop(0))
        kept = Kept()
        decoded = self._first(schedule, book, parts, sent, kept)
        wanted = self.rules.of_step(schedule.sample_rows, schedule.early[0]) if decoded is not None else None
        followers = [] if wanted is None else [self.constraints.rows[row] for row in wanted.rows[wanted.constrained].tolist()]
        if followers and plan.num_steps > 1:
            raise PlanError(f"step {plan.step}: a plan of {plan.num_steps} steps holds a constrained row")
        return _Pending(plan, schedule, kept, decoded, wanted, followers)

    def _finish(self, pending: _Pending) -> None:
        """Draws by rules, runs the plan's later steps, and sends its results down."""
        schedule, kept, masks = pending.schedule, pending.kept, None
        if pending.followers and pending.wanted is not None:
            for earlier in self._pending:
                if earlier is not pending:
                    self._settle(earlier)
            if schedule.forced is not None:
                self.constraints.take(schedule.forced)
            masks = self.constraints.masks(pending.followers, pending.wanted.constrained, pending.wanted.kinds)
        self._sampled(schedule.sample_rows, pending.wanted, pending.decoded, kept, masks)
        for rows, early in zip(schedule.later, schedule.early[1:], strict=True):
            self._sampled(rows, self.rules.of_step(rows, early), self._later(rows) if len(rows) else None, kept)
        pending.decoded = None
        pending.download = self.backend.staging.download()

    def _settle(self, pending: _Pending) -> Arrays:
        """What came down, waiting for it; constraints take their rows' tokens, once."""
        if pending.arrays is None:
            assert pending.download is not None
            pending.arrays, pending.device_us = pending.download.wait()
            if pending.followers and pending.wanted is not None:
                out = pending.arrays[len(pending.kept.prompts)]
                for follower, place in zip(pending.followers, pending.wanted.places[pending.wanted.constrained].tolist(), strict=True):
                    out[1, place] = follower.take(int(out[0, place]), int(out[1, place]))
                    if run := follower.news():
                        pending.runs.append((place, run))
        return pending.arrays

    def _pack_rows(self, schedule: Schedule, book: RowBook, packet: Packet) -> bool:
        """Adds what the first step of the plan needs. Whether a decode-only step sends row numbers."""
        if not schedule.decode_only:
            size = self._mixed_size(schedule)
            if size is not None and self._mixed_graphs is not None:
                packet.add(self._mixed_graphs.pack(size, schedule, book))
            else:
                pack_mixed(schedule, book, packet)
            return True
        rows = schedule.decode_rows
        if not len(rows):
            return False
        padded = self._graphs.padded(rows, book) if self._graphs is not None else rows
        if padded is None:
            return False
        packet.add(padded)
        return True

    def _first(self, schedule: Schedule, book: RowBook, parts: list[Tensor], sent: bool, kept: Kept) -> Decoded | None:
        """The plan's first step; None if nobody samples in it."""
        if not schedule.decode_only:
            return self._mixed(schedule, book, parts, kept)
        if len(schedule.decode_rows):
            return self._decode_rows(parts[0] if sent else None)
        return None

    def _sampled(self, rows: Int, wanted: StepRules | None, decoded: Decoded | None, kept: Kept, masks: Masks | None = None) -> None:
        """One step's tokens are drawn: rows that have rules are drawn again, and what is to come down is kept."""
        step = SubStep(rows, rows[:0], rows[:0])
        kept.steps.append(step)
        if decoded is None:
            return
        if self.model.ranks.size > 1 and (wanted is not None or self.filters.any_of(rows)):
            logits = self.model.head.whole(decoded.logits)
            decoded = Decoded(sample_rows(self.ops, self.state, logits, decoded.rows), logits, decoded.rows)
        logprobs = None
        if wanted is not None:
            step.logprob_places, step.logprob_counts = wanted.logprob_places, wanted.logprob_counts
            logprobs = follow_rules(self.ops, self.state, self.rules, decoded, wanted, self.backend.staging, masks)
        self.backend.staging.keep(decoded.out[:, : len(rows)])
        if logprobs is not None:
            self.backend.staging.keep(logprobs)

    def _later(self, rows: Int) -> Decoded:
        """One more decode step of a k-step plan."""
        assert self._book is not None
        padded = self._graphs.padded(rows, self._book) if self._graphs is not None else rows
        sent = None
        if padded is not None:
            sent = self.backend.staging.upload(padded.astype(np.int32))
        return self._decode_rows(sent)

    def _decode_rows(self, sent: Tensor | None) -> Decoded:
        """A decode step, through a graph where there is one. sent: its rows' numbers, if the device lacks them."""
        if self._graphs is not None:
            return self._graphs.replay(sent)
        assert sent is not None
        return decode_step(self, sent)

    def _mixed_size(self, schedule: Schedule) -> Size | None:
        """The graph for a step with chunks. None: without one, as where a prompt's log-probabilities are wanted."""
        if self._mixed_graphs is None or len(self._prompt_parts(schedule)):
            return None
        return self._mixed_graphs.fitting(schedule)

    def _prompt_parts(self, schedule: Schedule) -> list[PromptPart]:
        return self.rules.prompt_parts(schedule.chunk_rows, schedule.chunk_starts, schedule.chunk_lengths)

    def _mixed(self, schedule: Schedule, book: RowBook, parts: list[Tensor], kept: Kept) -> Decoded | None:
        """A step with prefill chunks, decoding rows in front. Only rows that sample go through the head."""
        size = self._mixed_size(schedule)
        if size is not None and self._mixed_graphs is not None:
            decoded = self._mixed_graphs.replay(size, parts[0])
            return decoded if len(schedule.sample_rows) else None
        kept.prompts = self._prompt_parts(schedule)
        step, sample_index, rows = unpack_mixed(schedule, self.state, parts, whole=bool(kept.prompts))
        hidden = self.model.forward(self.ops, step, self.cache.layers)
        for part in kept.prompts:
            first = len(schedule.decode_rows) + part.first
            known = book.known[part.row, part.start : part.start + part.count]
            tokens = self.backend.staging.upload(known.astype(np.int32))
            self.backend.staging.keep(prompt_logprobs(self, hidden[first : first + part.count], tokens, part.num))
        if not len(schedule.sample_rows):
            return None
        sampling = sample_inputs(self.ops, self.state, rows, self.config.block_size)
        return draw(self, hidden.index_select(0, sample_index) if step.wanted is None else hidden, sampling)
