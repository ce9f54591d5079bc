"""The one table of options: flag, type, default, help, and which processes take it. `serve`, the role commands, the embedded LLM and
the README's table all come from it. Names are vLLM's where they mean the same."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagecast.cli.quantities import Number, Whole

SCHEDULER, WORKER, FRONTEND, GATEWAY, SERVE = "scheduler", "worker", "frontend", "gateway", "serve"
ROLES = (SCHEDULER, WORKER, FRONTEND)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. name: field of the role's configuration; the flag is the same with dashes. kind: bool, int, float or str.

    takers: the commands that have the flag. choices: the only values allowed; empty: any.
    """

    name: str
    kind: type
    default: Any
    help: str
    takers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that stands in for the flag where that is not given."""
        return "PAGECAST_" + self.name.upper()


_ALL = (SERVE, SCHEDULER, WORKER, FRONTEND, GATEWAY)
_SCHED = (SERVE, SCHEDULER)
_WORK = (SERVE, WORKER)
_FRONT = (SERVE, FRONTEND)
_LISTEN = (SERVE, FRONTEND, GATEWAY)
_BATCH = (SERVE, SCHEDULER, WORKER)

OPTIONS: tuple[Option, ...] = (
    Option("run_dir", str, None, "folder (mode 0700) of the cluster's sockets, shared by the roles of one host", ROLES, required=True),
    Option("model", str, "smollm2-135m", "folder in Hugging Face layout, .gguf file, or the name smollm2-135m", (WORKER, FRONTEND)),
    # what listens
    Option("host", str, "127.0.0.1", "address to listen on", _LISTEN),
    Option("port", int, 50051, "port to listen on; 0 takes a free one", _FRONT),
    Option("uds", str, None, "Unix socket to listen on as well", _FRONT),
    Option("num_frontends", int, 1, "front-end processes that share the port", (SERVE,)),
    Option("http_port", int, None, "port of OpenAI's HTTP API; 0 takes a free one (default: 8000 for `gateway`, none for `serve`)",
           (SERVE, GATEWAY)),
    Option("target", str, "127.0.0.1:50051", "gRPC addresses of the front ends, separated by commas", (GATEWAY,)),
    Option("target_tls", bool, False, "speak TLS to the front ends, and trust the system's authorities", (GATEWAY,)),
    Option("target_ca", str, None, "PEM file of the authority to trust there instead; means --target-tls", (GATEWAY,)),
    Option("target_cert", str, None, "PEM file of a client certificate to show the front ends; means --target-tls", (GATEWAY,)),
    Option("target_key", str, None, "PEM file of its private key", (GATEWAY,)),
    Option("target_name", str, None, "name to expect in the front ends' certificates; means --target-tls", (GATEWAY,)),
    Option("publish", str, None, "file that gets the address once it is listened on", (GATEWAY,)),
    Option("gateway_socket", bool, False, "listen in the run directory as well, for an HTTP gateway of this host", (FRONTEND,)),
    Option("served_model_name", str, None, "name that clients use for the model (default: the model's own)", _FRONT),
    Option("reflection", bool, None, "serve gRPC reflection, v1 and v1alpha (default: where only this machine reaches the port)", _FRONT),
    Option("tls_cert", str, None, "PEM file of the server's certificate chain; taken over when it changes (default: plaintext)", _LISTEN),
    Option("tls_key", str, None, "PEM file of the certificate's private key", _LISTEN),
    Option("tls_client_ca", str, None, "PEM file of the authority whose certificates clients must show (default: none needed)", _FRONT),
    Option("auth_file", str, None, "TOML file of principals and hashed tokens, see docs/security.md (default: everyone may ask)", _FRONT),
    Option("probe_host", str, "127.0.0.1", "address of the port for health checks", _FRONT),
    Option("probe_port", int, None, "plaintext port for health checks without credentials (default: none)", _FRONT),
    Option("admin_host", str, "127.0.0.1", "address of the operators' port", _FRONT),
    Option("admin_port", int, None, "port for callers with the admin role (default: the run directory's socket alone)", _FRONT),
    Option("max_connections", int, None, "connections that clients may open (default: what the file limit allows)", _FRONT),
    Option("max_streams_per_connection", int, 1000, "calls open at once on a connection; more are refused with UNAVAILABLE", _FRONT),
    Option("max_request_s", float, 86_400.0, "seconds that a request may take, whatever deadline its caller gives", _FRONT),
    Option("frontend_metrics_port", int, None, "loopback port for Prometheus metrics of front end 0; the next ones follow", _FRONT),
    Option("otlp_endpoint", str, None, "URL of an OpenTelemetry collector (OTLP over gRPC) that gets a span per call", _FRONT),
    Option("insecure", bool, False, "allow plaintext on an address that other machines reach", _LISTEN),
    Option("max_message_bytes", int, 8 << 20, "largest message taken or sent, in bytes", _LISTEN),
    Option("max_metadata_bytes", int, 16 << 10, "metadata taken with a call, in bytes", _FRONT),
    Option("http_arrival_s", float, 30.0, "seconds for the head of an HTTP request to come, and for each further part of its body",
           (SERVE, GATEWAY)),
    Option("drain_announce_s", float, 5.0, "after SIGTERM, seconds of NOT_SERVING before new calls are refused", _LISTEN),
    Option("drain_timeout_s", float, 30.0, "after SIGTERM, seconds that running calls may go on", _LISTEN),
    Option("slow_consumer_timeout_s", float, 60.0, "seconds without its client reading anything after which a stream is ended", _LISTEN),
    Option("max_detach_grace_s", float, 300.0, "longest time a detached stream may ask to go on without a reader, in seconds", _FRONT),
    Option("reuse_port", bool, False, "share the port with other front ends of this host, or with who keeps it", (FRONTEND, GATEWAY)),
    Option("index", int, 0, "number of this front end among its host's", (FRONTEND,)),
    # the batch
    Option("max_model_len", int, None, "longest prompt plus output of one request, in tokens (default: the model's)", _BATCH),
    Option("max_num_seqs", int, 256, "sequences that run at the same time", _BATCH),
    Option("max_num_batched_tokens", int, 2048, "tokens that one step computes; longer prompts are prefilled in chunks", _BATCH),
    Option("block_size", int, 16, "tokens in a block of KV memory: 16, 32, 64 or 128", _BATCH),
    Option("num_blocks", int, None, "blocks of the KV pool (default: what memory allows)", _BATCH),
    Option("enable_prefix_caching", bool, True, "reuse the KV blocks of equal prompt beginnings", _SCHED),
    Option("batch_delay_ms", float, 0, "idle time that may be spent gathering a first batch, at most 10 ms", _SCHED),
    Option("max_queued_requests", int, 2048, "requests that may wait; more are refused with UNAVAILABLE", _SCHED),
    Option("max_queued_tokens", int, 4_000_000, "prompt tokens that may wait; more are refused with UNAVAILABLE", _SCHED),
    Option("max_plans_in_flight", int, 2, "step plans sent ahead of their results", _SCHED),
    Option("max_steps_per_plan", int, 1, "decode steps that one plan may carry while nothing waits; 0: as many as take 8 ms", _SCHED),
    Option("fill_steps", bool, True, "while requests wait for a row, fit prefill to the steps that a GPU computes best", _SCHED),
    Option("resume_grace_s", float, 30.0, "seconds that requests of a dead front end go on for somebody to resume them", _SCHED),
    Option("resume_retention_s", float, 60.0, "seconds that the output of an ended stream is kept for a reader that lost it", _SCHED),
    # the model and its device
    Option("tensor_parallel_size", int, 1, "ranks that split the model; one worker process and one GPU each", _BATCH),
    Option("rank", int, 0, "rank of this worker", (WORKER,)),
    Option("launcher", str, "local", "where ranks run: local, static (this command once on each host), or ray", (SERVE,),
           choices=("local", "static", "ray")),
    Option("nnodes", int, 1, "hosts of the static launcher, each with as many ranks", (SERVE,)),
    Option("node_rank", int, 0, "number of this host, for the static launcher; host 0 runs scheduler and front ends too", (SERVE,)),
    Option("head", str, None, "host:port where the scheduler listens for ranks of other hosts", _BATCH),
    Option("wire_keys", str, None, "folder of keys (`pagecast keys`) for the link between scheduler and ranks", _BATCH),
    Option("insecure_wire", bool, False, "allow that link between hosts without keys", _BATCH),
    Option("executor", str, "torch", "what runs plans: torch, or the model-free oracle", _WORK, choices=("torch", "oracle")),
    Option("device", str, "auto", "auto, cpu, cuda or cuda:N", _WORK),
    Option("dtype", str, "auto",
           "auto, float32, bfloat16 or float16; auto is bfloat16 on a GPU, on a CPU what is faster when the cluster starts", _WORK,
           choices=("auto", "float32", "bfloat16", "float16")),
    Option("quantization", str, None,
           "round a model's weights while they are loaded: fp8, or int4 in groups of 128 (an untied output head: int8 by row)", _WORK,
           choices=("fp8", "int4")),
    Option("kv_cache_dtype", str, "auto", "fp8 stores K and V in 8 bits; auto is the model's own type", _WORK, choices=("auto", "fp8")),
    Option("gpu_memory_utilization", float, 0.9, "share of the GPU's memory that a worker may fill", _WORK),
    Option("cpu_kv_gib", float, 1.0, "memory of the KV pool on a CPU, in GiB", _WORK),
    Option("enforce_eager", bool, False, "run without CUDA graphs", _WORK),
    Option("batch_invariant", bool, False, "on a GPU, slower: a request's tokens are the same in any company", _WORK),
    Option("fold_norms", bool, True, "on a GPU, multiply norm weights into products where a model allows it: fewer launches", _WORK),
    Option("tokenizer", str, None, "take tokenizer and chat template of this model, or of a folder with tokenizer.json", (SERVE,)),
    Option("random_weights", str, None, "no model: made-up weights for the config.json of this folder", _WORK),
    Option("oracle_vocab_size", int, 49152, "vocabulary of the oracle", _WORK),
    Option("oracle_step_us", int, 0, "microseconds that the oracle takes for a step", _WORK),
    # watching and debugging
    Option("step_deadline_s", float, 30.0, "seconds after which a silent step counts as a hung rank", _SCHED),
    Option("heartbeat_timeout_s", float, 10.0, "seconds without a heartbeat after which a rank counts as lost", _SCHED),
    Option("rank_timeout_s", float, 600.0, "seconds that a rank may take to load", _SCHED),
    Option("record", str, None, "file to record the scheduler's events in, for `pagecast replay`; one that is there becomes FILE.before",
           _SCHED),
    Option("record_tokens", bool, False, "record token ids too, which are prompts", _SCHED),
    Option("metrics_port", int, None, "loopback port for Prometheus metrics of the scheduler (default: none)", _SCHED),
    Option("check_invariants", bool, False, "audit the block pool and all requests after every step (slow)", _SCHED),
    Option("log_format", str, "auto", "json, console, or auto: console on a terminal", _ALL, choices=("auto", "json", "console")),
    Option("log_level", str, "info", "debug, info, warning or error", _ALL, choices=("debug", "info", "warning", "error")),
)


_TYPES: dict[type, Callable[[str], Any]] = {int: Whole(), float: Number(), str: str}
"""How a value is read. Its range is the roles' configurations' to check, where programs that embed a cluster meet it too."""
_KINDS = (
    ("PEM file", "FILE"), ("TOML file", "FILE"), ("file ", "FILE"), ("folder (", "FOLDER"), ("folder of", "FOLDER"), ("no model", "FOLDER"),
    ("Unix socket", "PATH"), ("URL", "URL"), ("host:port", "HOST:PORT"), ("gRPC addresses", "HOST:PORT"), ("take tokenizer", "MODEL"),
)
"""How the help of a text begins, and what stands for its value there."""
_NAMES = re.compile(
    r"(?<![-\w/])(?:" + "|".join(option.name for option in OPTIONS if "_" in option.name) + r")(?!\w)"
    + r"|^(?:" + "|".join(option.name for option in OPTIONS) + r")(?= (?:must|is|needs) )"
)
_SUPERVISED = "PAGECAST_LIFELINE"
"""Set by a supervisor for the processes that it starts."""
_TRUTH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def of(taker: str) -> Iterator[Option]:
    """The options of one command, in the table's order."""
    return (option for option in OPTIONS if taker in option.takers)


def is_supervised() -> bool:
    """Whether a supervisor started this process, with options that it has checked."""
    return _SUPERVISED in os.environ


def add(parser: argparse.ArgumentParser, chosen: Iterable[Option]) -> None:
    """Give `parser` these options. What is not given is taken from the environment, and else is the default; a role that a supervisor
    started is told everything, and looks at no variable."""
    for option in chosen:
        default, required = option.default, option.required
        if option.variable in os.environ and not is_supervised():
            default, required = _from_environment(parser, option), False
        text = option.help if option.default is None or "(default" in option.help else f"{option.help} (default: {_shown(option.default)})"
        if option.kind is bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            parser.add_argument(
                option.flag, type=_TYPES[option.kind], default=default, choices=option.choices or None, required=required,
                help=text.replace("%", "%%"), metavar=_stand_in(option),
            )


def _stand_in(option: Option) -> str | None:
    """What a help writes for the value of a text; the parser knows it for the rest."""
    if option.kind is not str or option.choices:
        return None
    return next((word for start, word in _KINDS if option.help.startswith(start)), option.name.rpartition("_")[2].upper())


def _from_environment(parser: argparse.ArgumentParser, option: Option) -> Any:
    """The variable's value; what it cannot be ends the command."""
    text = os.environ[option.variable]
    try:
        if option.kind is bool:
            return _TRUTH[text.lower()]
        value = _TYPES[option.kind](text)
    except KeyError:
        parser.error(f"the variable {option.variable} must be on or off, not {text!r}")
    except argparse.ArgumentTypeError as error:
        parser.error(f"the variable {option.variable} {error}")
    if option.choices and value not in option.choices:
        parser.error(f"the variable {option.variable} must be one of {', '.join(option.choices)}, not {text!r}")
    return value


def assignment(text: str) -> str:
    """An argparse type: NAME=VALUE of a serve option, as a measurement passes it on."""
    name, sign, value = text.partition("=")
    option = next((option for option in of(SERVE) if option.name == name.replace("-", "_")), None)
    if option is None or not sign:
        raise argparse.ArgumentTypeError(f"must be an option of serve, = and its value, not {text!r}")
    if option.kind is bool and value not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{name} must be true or false, not {value!r}")
    try:
        _TYPES.get(option.kind, str)(value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name} {error}") from None
    return text


def values(args: argparse.Namespace, taker: str) -> dict[str, Any]:
    """The parsed options of one command, by field name."""
    return {option.name: getattr(args, option.name) for option in of(taker)}


def words(taker: str, given: Mapping[str, Any]) -> list[str]:
    """The command line that gives one command these values; what is the default anyway is left out."""
    line: list[str] = []
    for option in of(taker):
        value = given[option.name]
        if value == option.default or value is None:
            continue
        if option.kind is bool:
            line.append(option.flag if value else f"--no-{option.flag.removeprefix('--')}")
        else:
            line += [option.flag, str(value)]
    return line


def flagged(text: str) -> str:
    """What a configuration says of its fields, in the words of the command line: names of options become their flags."""
    return _NAMES.sub(lambda found: "--" + found[0].replace("_", "-"), text)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def markdown() -> str:
    """The table of `serve`'s options in the README."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in of(SERVE):
        default = "" if option.default is None else _shown(option.default)
        rows.append(f"| `{option.flag}` | {default} | {option.help.replace('|', '/')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
