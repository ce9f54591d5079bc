"""`pagecast quantize MODEL OUT --to METHOD`: a checkpoint folder with weights of 4 or 8 bits, as other engines read it too.

A run that was cut off is gone on with by the same command. Methods that look at what a layer is given take a text to run through the
model; without one it is the language reference that every Python brings.
"""

import argparse
import sys
from pathlib import Path

from pagecast import models
from pagecast.cli.quantities import COUNT, Whole
from pagecast.errors import PagecastError

METHODS = ("awq", "gptq", "rtn-int4", "fp8")
_CALIBRATED = ("awq", "gptq")


class CannotQuantize(PagecastError):
    """A model, method or folder that does not go together."""

    exit_code = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as for serve: a name, a folder or a .gguf file")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--to", required=True, choices=METHODS,
                        help="awq and gptq calibrate int4, rtn-int4 rounds to the nearest; fp8 is e4m3, calibrated where a text is given")
    parser.add_argument("--calibration", metavar="FILE", help="a UTF-8 text like what the model will serve (awq, gptq; fp8 if given)")
    parser.add_argument("--samples", type=COUNT, default=128, metavar="N", help="pieces of the text to use (default: %(default)s)")
    parser.add_argument("--sample-tokens", type=Whole(16), default=512, metavar="N", help="tokens of a piece (default: %(default)s)")
    parser.add_argument("--group-size", type=Whole(32), default=128, metavar="N",
                        help="int4 columns that share a scale (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.group_size not in (32, 64) and args.group_size % 128:
        raise CannotQuantize(f"--group-size must be 32, 64 or a multiple of 128, got {args.group_size}")
    if args.calibration and args.to == "rtn-int4":
        raise CannotQuantize("--calibration must not be given for rtn-int4, which looks at weights only")
    source = models.resolve(args.model)
    from pagecast_worker.backend import device_named
    from pagecast_worker.executor import LoadError
    from pagecast_worker.quantizing.run import Job, quantize

    progress = _Bar()
    try:
        job = Job(source, Path(args.out), args.to, args.group_size, _sequences(args, source), device_named(args.device))
        quantize(job, progress.show)
        if source.is_file():
            _write_tokenizer(source, job.out)
    except LoadError as error:
        raise CannotQuantize(str(error)) from None
    except OSError as error:
        raise CannotQuantize(f"cannot write to {args.out}: {error.strerror}") from None
    finally:
        progress.close()
    print(f"{args.to} checkpoint in {args.out}")
    return 0


def _sequences(args: argparse.Namespace, source: Path) -> list[list[int]]:
    """Calibration tokens, where the method wants any."""
    if args.to not in _CALIBRATED and args.calibration is None:
        return []
    from pagecast_scheduler.frontend.tokenizer import load_tokenizer
    from pagecast_worker.quantizing.calibration import sequences_of

    tokens = load_tokenizer(str(source)).encode(text_of(args.calibration), add_special_tokens=False)
    found = list(sequences_of(tokens, args.sample_tokens, args.samples))
    if not found:
        raise CannotQuantize(f"--calibration must have at least --sample-tokens {args.sample_tokens} tokens, got {len(tokens)}")
    return found


def text_of(name: str | None) -> str:
    """A file, or without one the language reference that Python brings."""
    if name is None:
        from pydoc_data.topics import topics

        return "\n\n".join(text for _, text in sorted(topics.items()))
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CannotQuantize(f"{name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CannotQuantize(f"{name}: not UTF-8 text") from None


def _write_tokenizer(source: Path, out: Path) -> None:
    """The tokenizer of a .gguf file, as a folder holds it."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


class _Bar:
    """One bar over the files to write; plain lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._console = Console(stderr=True)
        self._bar = Progress(console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)
        self._shown = ""
        self._bar.start()

    def show(self, done: int, total: int, text: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=text)
        if not self._console.is_terminal and text != self._shown:
            print(text, file=sys.stderr, flush=True)
        self._shown = text

    def close(self) -> None:
        self._bar.stop()
