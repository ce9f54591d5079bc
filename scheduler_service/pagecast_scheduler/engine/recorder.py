"""Writes down everything that goes into the scheduler core and every plan that comes out, so that `replay` can run it again.

The core is deterministic: the same inputs at the same microseconds give the same plans. So every call that can change it must be
recorded, in order and with its `now`:

    control  "create" {config, epoch} when a Scheduler is made; before start_epoch {}, fail_epoch {loss}, drop_frontend {slot, spared},
             constraint_prepared {digest, fault}, reset_prefix_cache {}, before an expire {} outside plan_step, and
             before an abort {key, reason} that no front end asked for
    arrival  before submit, abort, stop_at or pause, with the front end's message
    plan     after every plan_step, also when it returned None: an attempt may end requests whose time has run out
    result   before apply_result

File: the line MAGIC, then frames of u32 little-endian length and msgpack [at_us, kind, body]. A file cut short by a crash is good up to
its last whole frame. Tenants are written as salted digests, and nothing of whom a request belongs to; token ids, and the text of
constraints, only on request: else their number stands in for the ids, and nothing for the text.
"""

import hashlib
import os
import struct
from typing import Any

import msgspec

from pagecast_scheduler.engine.logs import logger
from pagecast_wire.codec import WIRE_DIGEST, encode
from pagecast_wire.intake import Abort, Identity, Pause, StopAt, Submit
from pagecast_wire.plan import Admission, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint, SamplingParams

MAGIC = b"pagecast recording 1\n"
LENGTH = struct.Struct("<I")
BUFFER_BYTES = 1 << 20
"""Most that waits in memory; the operating system has the rest."""
FLUSH_US = 1_000_000
"""After so long what is in memory is handed to the operating system, so that a killed process leaves a file of use."""

Arrival = Submit | Abort | StopAt | Pause


class Recorder:
    """One recording. A disk that refuses ends the recording, never the engine: see `error`."""

    def __init__(self, path: str, with_tokens: bool) -> None:
        """Raises OSError if the file cannot be made; it is readable by its owner only. A recording that is there, as a scheduler that
        died leaves to the next one, becomes `path`.before."""
        self.with_tokens = with_tokens
        self.error = ""
        self._path = path
        self._salt = os.urandom(16)
        self._flushed_at = 0
        self._encoder = msgspec.msgpack.Encoder()
        if os.path.isfile(path) and os.path.getsize(path):
            os.replace(path, f"{path}.before")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = open(descriptor, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed by close()
        self._file.write(MAGIC)
        self._write(0, "header", {"wire_digest": WIRE_DIGEST, "with_tokens": with_tokens})

    def arrival(self, now: int, message: Arrival) -> None:
        """What a front end asks for, as it is passed on to the core."""
        if isinstance(message, Submit):
            tenant = hashlib.blake2b(message.tenant.encode(), key=self._salt, digest_size=8).hexdigest() if message.tenant else ""
            message = msgspec.structs.replace(message, tenant=tenant, identity=Identity())
            if not self.with_tokens:
                message = without_prompt(message)
        self._write(now, "arrival", encode(message))

    def control(self, now: int, name: str, args: dict[str, Any]) -> None:
        """Any other call that changes the core, by its name."""
        self._write(now, name, args)

    def plan(self, now: int, plan: StepPlan | None) -> None:
        """What plan_step returned."""
        if plan is None:
            self._write(now, "no_plan", b"")
        else:
            self._write(now, "plan", encode(plan if self.with_tokens else without_token_ids(plan)))

    def result(self, now: int, result: StepResult) -> None:
        """What a step produced, as it is passed on to the core."""
        if not self.with_tokens:
            untold = dict.fromkeys(("top_ids", "top_logprobs", "logprobs", "prompt_top_ids", "prompt_top_logprobs", "prompt_logprobs"), b"")
            result = msgspec.structs.replace(
                result, tokens=count_of(result.tokens), forced_tokens=_count_of_some(result.forced_tokens), **untold
            )  # fmt: skip
        self._write(now, "result", encode(result))

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self.error:
            self.error = error.strerror or "unknown error"
            logger("recorder").error("recording ends early", path=self._path, error=self.error)

    def _write(self, at: int, kind: str, body: Any) -> None:
        if self.error or self._file.closed:
            return
        frame = self._encoder.encode((at, kind, body))
        try:
            self._file.write(LENGTH.pack(len(frame)) + frame)
            if at - self._flushed_at >= FLUSH_US:
                self._file.flush()
                self._flushed_at = at
        except OSError as error:
            self._fail(error)
            self.close()


def count_of(column: bytes) -> bytes:
    """What stands in for a u32 column of token ids: how many they are, as one u32."""
    return LENGTH.pack(len(column) // 4)


def _count_of_some(column: bytes) -> bytes:
    """The same for a column that most messages do not have."""
    return count_of(column) if column else b""


def without_prompt(submit: Submit) -> Submit:
    """The request with counts in place of its token ids."""
    return msgspec.structs.replace(
        submit, prompt=count_of(submit.prompt), history=tuple(count_of(column) for column in submit.history),
        sampling=_without_ids(submit.sampling),
    )  # fmt: skip


def without_token_ids(plan: StepPlan) -> StepPlan:
    """The plan with counts in place of the token ids of its admissions and jumps."""
    admissions = tuple(_redact(admission) for admission in plan.admissions)
    return msgspec.structs.replace(plan, admissions=admissions, forced_tokens=_count_of_some(plan.forced_tokens))


def _redact(admission: Admission) -> Admission:
    return msgspec.structs.replace(admission, tokens=count_of(admission.tokens), sampling=_without_ids(admission.sampling))


def _without_ids(sampling: SamplingParams) -> SamplingParams:
    """Without ids, and without the text of a constraint."""
    constraint = None if sampling.constraint is None else Constraint(sampling.constraint.kind)
    columns = ("logit_bias_ids", "logit_bias_values", "allowed_token_ids", "bad_word_tokens", "bad_word_lengths")
    return msgspec.structs.replace(sampling, constraint=constraint, **dict.fromkeys(columns, b""))
