"""What options of the benches make of the work, without a server or a GPU: parsed as the command line is, seen in what would be run."""

import argparse
from pathlib import Path

import pytest

from pagecast.bench import results, workloads
from pagecast.cli import bench_quantized, bench_serve


def serve_args(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_args(line.split())


def spans(line: str, repetition: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
    """Fewest and most words of a prompt, without its number, and tokens of an output."""
    asks = bench_serve.make_asks(serve_args(line), None, repetition)
    words, tokens = [len(ask.prompt.split()) - 1 for ask in asks], [ask.output_tokens for ask in asks]
    return (min(words), max(words)), (min(tokens), max(tokens))


@pytest.mark.parametrize(
    ("line", "prompt", "output"),
    [
        ("", (102, 410), (77, 307)),  # 256 and 192, less and more by 0.6 of it
        ("--input-tokens 40 --output-tokens 10", (16, 64), (4, 16)),
        ("--input-tokens 40 --output-tokens 10 --range-ratio 0.5", (20, 60), (5, 15)),
        ("--input-tokens 40 --output-tokens 10 --range-ratio 0", (40, 40), (10, 10)),
        ("--input-tokens 4 --output-tokens 3 --range-ratio 1", (1, 8), (1, 6)),  # none is empty
        ("--input-tokens 1 --output-tokens 1 --range-ratio 1", (1, 2), (1, 2)),
    ],
)
def test_serve_draws_lengths_around_their_means(line: str, prompt: tuple[int, int], output: tuple[int, int]) -> None:
    assert spans(f"{line} --num-prompts 4000") == (prompt, output)


def test_serve_draws_all_lengths_alike_and_others_in_every_repetition() -> None:
    args = serve_args("--input-tokens 40 --range-ratio 0.5 --num-prompts 4000")
    first, again, other = (bench_serve.make_asks(args, None, repetition) for repetition in (1, 1, 2))
    lengths = [len(ask.prompt.split()) - 1 for ask in first]
    assert 39 < sum(lengths) / len(lengths) < 41
    assert min(lengths.count(length) for length in range(20, 61)) > 40  # of about 98
    assert first == again and not {ask.prompt for ask in first} & {ask.prompt for ask in other}


@pytest.mark.parametrize("wrong", ["--input-tokens 0", "--input-tokens 2.5", *(f"--range-ratio {ratio}" for ratio in (-0.1, 1.1, "nan"))])
def test_serve_refuses_lengths_that_cannot_be(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_args(wrong)
    assert f"argument {wrong.split()[0]}: must be" in capsys.readouterr().err


class Steady:
    """An engine that takes a second for everything, 16 bits two."""

    def __init__(self, options: dict[str, str], running: list[dict[str, str]]) -> None:
        self.options, self.running, self.loads = options, running, set[str]()
        running.append(options)

    def run(self, load: str, repetition: int, limit: int | None) -> tuple[float, int]:
        self.loads.add(load)
        seconds = 1.0 if {"quantization", "kv_cache_dtype"} & self.options.keys() else 2.0
        return seconds / (4 if load.endswith("_start") else 1), sum(count for _, count in workloads.make(load))

    def close(self) -> None:
        self.running.remove(self.options)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Steady]:
    """What the bench starts, in place of engines on a GPU."""
    from pagecast_kernels import bench_cases  # triton, which tests of kernels want to choose the interpreter for before it is imported

    started: list[Steady] = []
    running: list[dict[str, str]] = []

    def engine(shape: str, options: dict[str, str], share: float) -> Steady:
        assert (shape, share) == ("llama8b", bench_quantized.SHARE) and len(running) < 2
        started.append(Steady(options, running))
        return started[-1]

    monkeypatch.setattr(bench_cases, "has_gpu", lambda: True)
    monkeypatch.setattr(bench_quantized, "_engine", engine)
    return started


def quantized(folder: Path, *words: str) -> tuple[int, dict[str, float]]:
    """Exit status and figures of part 8b."""
    parser = argparse.ArgumentParser()
    bench_quantized.add_arguments(parser)
    given = ["--parts", "8b", "--repetitions", "1", "--warmup", "0", "--results", str(folder), *words]
    status = bench_quantized.run(parser.parse_args(given))
    (record,) = results.read_all(str(folder))
    return status, record["metrics"]


def test_quantized_runs_every_variant_unless_told(tmp_path: Path, engines: list[Steady]) -> None:
    status, metrics = quantized(tmp_path)
    assert status == 0 and len(engines) == len(bench_quantized.VARIANTS)
    assert {name for name in metrics if "ratio" in name} == set(bench_quantized.RATIOS)
    assert {metrics[name] for name in bench_quantized.RATIOS} == {2.0}


@pytest.mark.parametrize(
    ("variants", "ratios"),
    [
        ("int4", set[str]()),
        ("bf16", set[str]()),
        ("fp8_kv,bf16", {"quantization.fp8_kv.256x1024.ratio_bf16"}),
        ("bf16,int4", {"quantization.int4.batch1.ratio_bf16", "quantization.int4.batch64.ratio_bf16"}),
    ],
)
def test_quantized_runs_the_variants_it_is_told(tmp_path: Path, engines: list[Steady], variants: str, ratios: set[str]) -> None:
    status, metrics = quantized(tmp_path, "--variants", variants)
    named = variants.split(",")
    assert status == 0 and len(engines) == len(named)
    for name in named:
        options, loads = bench_quantized.VARIANTS[name]
        (own,) = [engine for engine in engines if engine.options == options | {"num_blocks": str(bench_quantized.BLOCKS[name])}]
        assert own.loads - {"context1k_start"} == set(loads)
    times = {f"quantization.{name}.{load}.s" for name in named for load in bench_quantized.VARIANTS[name][1]}
    assert metrics.keys() == times | ratios
    assert not engines[0].running, "an engine was left behind"


@pytest.mark.parametrize("wrong", ["", "int5", "bf16,", "bf16 int4"])
def test_quantized_refuses_variants_that_it_does_not_have(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_quantized.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--variants", wrong])
    assert "argument --variants: must be of bf16, int4, fp8, fp8_kv, with commas between, not " in capsys.readouterr().err
