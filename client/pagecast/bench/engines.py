"""The engines that an offline measurement can drive: ours, and peers in a process of their own, behind one interface.

Fairness is fixed here: every engine gets the same prompts, limits and memory share, temperature 1 and no end-of-sequence;
prompts are shifted in every repetition and each repetition uses a cache scope of its own, so that nothing is cached from the one before.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

from pagecast.bench import model_shapes, workloads


@dataclass(frozen=True)
class EngineOptions:
    """What both sides of a comparison are given. shape: a name of model_shapes.SHAPES, or a model for `ours`."""

    shape: str
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 16384
    memory_share: float = 0.9
    max_model_len: int | None = None
    defaults: bool = False  # a peer at its own defaults: only memory share and the model are given
    extra: tuple[str, ...] = ()  # further serve options of ours, as NAME=VALUE
    tensor_parallel_size: int = 1
    checkpoint: str | None = None  # a peer's weights: as model_shapes.quantization_config names them
    longest_first: bool = False  # every engine is offered the longest outputs first, instead of the workload's own order


def shifted(
    name: str, repetition: int, vocab_size: int, limit: int | None = None, longest_first: bool = False
) -> list[tuple[list[int], int]]:
    """The workload with every token id moved by a step of its own for this repetition, inside the vocabulary."""
    low, span = 10, min(vocab_size, workloads.VOCAB) - 10
    work = workloads.make(name)[:limit]
    if longest_first:
        work.sort(key=lambda request: -request[1])
    return [([low + (token - low + 7919 * repetition) % span for token in prompt], count) for prompt, count in work]


def named_values(items: Iterable[str]) -> dict[str, Any]:
    """Options given as NAME=VALUE. A value is JSON, or else a name, such as a dtype's."""
    found: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        try:
            found[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.replace("-", "_")] = value
    return found


STATUS_S = 1.5
"""After so many idle seconds front ends know all that the scheduler has counted: it tells them each second."""


class Engine(Protocol):
    """Runs whole workloads. run returns seconds from the first submit to the last token, and the output tokens counted."""

    name: str

    def run(self, workload: str, repetition: int, limit: int | None) -> tuple[float, int]: ...

    def device_s(self) -> float | None:
        """Seconds that steps have taken on the device so far; None if the engine does not say."""

    def close(self) -> None: ...


class Pagecast:
    """Our own engine through the public LLM class: a private cluster, unary Generate calls with token ids in and out.

    request_options: of every request."""

    name = "pagecast"
    request_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, options: EngineOptions) -> None:
        from pagecast.llm import LLM

        self._longest_first = options.longest_first
        self._folder = tempfile.TemporaryDirectory(prefix="pagecast-bench-")
        settings: dict[str, Any] = {"tensor_parallel_size": options.tensor_parallel_size} | named_values(options.extra)
        if options.shape in model_shapes.SHAPES:
            settings["random_weights"] = model_shapes.write(options.shape, self._folder.name)
            self.vocab_size = int(str(model_shapes.SHAPES[options.shape]["vocab_size"]))
        else:
            settings["model"] = options.shape
            self.vocab_size = workloads.VOCAB
        if options.max_model_len is not None:
            settings["max_model_len"] = options.max_model_len
        self._llm = LLM(
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens,
            gpu_memory_utilization=options.memory_share, **settings,
        )

    def run(self, workload: str, repetition: int, limit: int | None) -> tuple[float, int]:
        from pagecast.sampling import SamplingParams

        work = shifted(workload, repetition, self.vocab_size, limit, self._longest_first)
        params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work]
        start = time.perf_counter()
        prompts = [prompt for prompt, _ in work]
        outputs = self._llm.generate(prompts, params, cache_scope=f"repetition-{repetition}", **self.request_options)
        seconds = time.perf_counter() - start
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)

    def device_s(self) -> float | None:
        from pagecast.sync import Client

        time.sleep(STATUS_S)
        with Client(self._llm.target) as client:
            return client.load().device_us / 1e6

    def close(self) -> None:
        self._llm.close()
        self._folder.cleanup()


class Invariant(Pagecast):
    """Our own engine once more, with --batch-invariant."""

    name = "batch_invariant"

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(replace(options, extra=(*options.extra, "batch_invariant=true")))


class NormalClass(Pagecast):
    """Our own engine once more, with requests of class normal: begun in the order of the workload, each as soon as it can be."""

    name = "normal_class"
    request_options: ClassVar[dict[str, Any]] = {"priority": "normal"}


OURS = {engine.name: engine for engine in (Invariant, NormalClass)}
"""Peers that are our own engine in another way."""


class Peer:
    """Another engine in a child process that runs pagecast.bench.peer_<name>; JSON lines over two pipes, its log to a file."""

    def __init__(self, name: str, options: EngineOptions, log_folder: str) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix=f"pagecast-bench-{name}-")
        settings = {
            "folder": model_shapes.write(options.shape, self._folder.name, options.checkpoint),
            "vocab_size": model_shapes.SHAPES[options.shape]["vocab_size"],
            "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_num_batched_tokens,
            "memory_share": options.memory_share, "max_model_len": options.max_model_len, "defaults": options.defaults,
            "tensor_parallel_size": options.tensor_parallel_size, "longest_first": options.longest_first,
        }
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        Path(log_folder).mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = (Path(log_folder) / f"peer-{name}.log").open("wb")
        command = [sys.executable, "-m", f"pagecast.bench.peer_{name}", str(down_read), str(up_write)]
        self._process = subprocess.Popen(command, pass_fds=(down_read, up_write), stdout=self._log, stderr=self._log)
        os.close(down_read)
        os.close(up_write)
        self._down, self._up = os.fdopen(down_write, "w"), os.fdopen(up_read)
        self._ask(settings)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._down.write(json.dumps(message) + "\n")
        self._down.flush()
        answer = self._up.readline()
        if not answer:
            raise SystemExit(f"the peer {self.name} ended; its log is {self._log.name}")
        result: dict[str, Any] = json.loads(answer)
        if "error" in result:
            raise SystemExit(f"the peer {self.name} failed: {result['error']}")
        return result

    def run(self, workload: str, repetition: int, limit: int | None) -> tuple[float, int]:
        answer = self._ask({"workload": workload, "repetition": repetition, "limit": limit})
        return float(answer["seconds"]), int(answer["output_tokens"])

    def device_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._down.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._up.close()
        self._folder.cleanup()
