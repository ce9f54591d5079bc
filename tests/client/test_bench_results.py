"""The bench's own arithmetic: shifted workloads, latency figures, verdicts."""

import argparse
import json
import tomllib
from pathlib import Path

import pytest

from pagecast.bench import figures, load, results, workloads
from pagecast.bench.engines import named_values, shifted
from pagecast.bench.progress import Progress
from pagecast.cli import bench_report, bench_serve, bench_throughput
from pagecast.cli.bench_startup import Phases, metrics_of

TARGETS = Path(__file__).parents[2] / "benchmarks" / "targets.toml"


def test_shift_keeps_lengths_and_leaves_no_shared_block() -> None:
    first, second = shifted("prefix", 1, 49152, 4), shifted("prefix", 2, 49152, 4)
    assert [(len(prompt), count) for prompt, count in first] == [(len(prompt), count) for prompt, count in second]
    assert all(a[:16] != b[:16] for (a, _), (b, _) in zip(first, second, strict=True))
    assert all(10 <= token < workloads.VOCAB for prompt, _ in second for token in prompt)
    assert first[0][0][:2048] == first[1][0][:2048]  # what one repetition shares stays shared


def test_percentiles_interpolate() -> None:
    found = results.percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found["mean"], found["p50"], found["p90"]) == (3.0, 3.0, pytest.approx(4.6))
    assert results.percentiles([]) == {}


def test_a_result_tells_its_command_without_the_folders_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, told in (
        (["throughput", "--workload", "chat", "--results", "/tmp/out"], "throughput --workload chat --results benchmarks/results"),
        (["kernels", "--results=/root/out"], "kernels --results benchmarks/results"),
        (["startup", f"--results={tmp_path}/mine", "--checkpoint", "/tmp/tmp.9/llama8b"], "startup --results mine --checkpoint llama8b"),
        (["serve", "--peer-url", "http://h/", "--name", "a b", "--results", "r"], "serve --peer-url http://h/ --name 'a b' --results r"),
    ):
        monkeypatch.setattr("sys.argv", ["pagecast", "bench", *given])
        path = results.write("out", "x", {"m": 1.0}, {})
        assert json.loads(path.read_text())["command"] == f"pagecast bench {told}"


def test_latency_figures_count_from_the_scheduled_arrival_and_split_coalesced_messages() -> None:
    line = load.Timeline(scheduled=1.0, marks=[(1.5, 1), (1.7, 4)])
    late = load.Timeline(scheduled=0.0, error="ServerError")
    found = load.summarize([line, late], 2.0, ttft_limit_ms=600, tpot_limit_ms=40)
    assert found["failed"] == 1
    assert found["ttft_ms"]["p50"] == pytest.approx(500)
    assert found["tpot_ms"]["p50"] == pytest.approx(50)
    assert found["itl_ms"]["p99"] == pytest.approx(50)
    assert found["tokens_per_message"] == 2.5
    assert found["goodput_req_s"] == 0.0  # TPOT limit missed


def test_poisson_arrivals_have_the_asked_rate() -> None:
    asks = load.poisson_asks(["a"] * 4000, [1] * 4000, 20.0, seed=3)
    assert asks[-1].arrival == pytest.approx(200, rel=0.1)
    assert {ask.arrival for ask in load.poisson_asks(["a"] * 3, [1] * 3, None, seed=3)} == {0.0}


def test_every_target_has_what_the_report_needs() -> None:
    targets = tomllib.loads(TARGETS.read_text())["target"]
    assert len({target["id"] for target in targets}) == len(targets)
    assert all({"group", "id", "metric", "bar", "direction"} <= target.keys() for target in targets)


@pytest.mark.parametrize(("value", "code"), [(12.0, 0), (9.0, 1), (None, 1)])
def test_report_is_red_while_a_bar_is_missed_or_unmeasured(tmp_path: Path, value: float | None, code: int) -> None:
    targets = tmp_path / "targets.toml"
    targets.write_text('[[target]]\ngroup = "g"\nid = "x"\nmetric = "m.x"\nbar = 10\ngoal = 20\ndirection = "min"\n')
    if value is not None:
        results.write(str(tmp_path / "results"), "x", {"m.x": value}, {})
    files = {"targets": str(targets), "results": str(tmp_path / "results")}
    args = argparse.Namespace(**files, group=None, write=True, plot=None, dollars_per_hour=None)
    assert bench_report.run(args) == code
    recorded = tomllib.loads(targets.read_text())["target"][0]
    assert recorded.get("reached") == value


def test_metric_names_carry_the_ratio_to_the_peer() -> None:
    given = {"tensor_parallel_size": 1, "random_weights": "llama8b", "peer": "vllm", "peer_only": False, "peer_defaults": False}
    args = argparse.Namespace(**given, limit=None, longest_first=False)
    work = [([1] * 10, 20)]
    ours, peer = bench_throughput.figures([2.0, 1.0, 3.0], 20, work), bench_throughput.figures([4.0] * 3, 20, work)
    metrics = bench_throughput.metrics_of(args, {"chat": {"pagecast": ours, "vllm": peer}})
    assert metrics["throughput.llama8b.chat.ratio_vllm"] == 2.0
    assert metrics["throughput.llama8b.chat.pagecast.out_tok_s"] == 10.0
    args.limit = 1  # another workload, whose figures are not to be taken for those of the whole one
    metrics = bench_throughput.metrics_of(args, {"chat": {"pagecast": ours, "vllm": peer}})
    assert all(name.startswith("throughput.llama8b.chat.first1.") for name in metrics)


def test_plot_is_drawn(tmp_path: Path) -> None:
    line = load.Timeline(0.0, [(0.1, 1), (0.2, 1)])
    row = {"pagecast": load.summarize([line], 1.0, None, None)}
    bench_serve.plot(str(tmp_path / "curve.png"), [(1.0, row), (2.0, row)])
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_result_files_say_how_to_run_them_again(tmp_path: Path) -> None:
    record = json.loads(results.write(str(tmp_path), "n", {"a": 1.0}, {}).read_text())
    assert {"command", "date", "machine", "versions", "metrics"} <= record.keys()


def test_a_million_tokens_cost_what_the_gpu_does_meanwhile() -> None:
    assert figures.dollars_per_million(1000.0, 3.6) == pytest.approx(1.0)


def test_comparisons_prefer_a_peer_of_the_same_run(tmp_path: Path) -> None:
    anchors = {"llama8b": {"decode": {"out_tok_s": 100.0}, "chat": {"out_tok_s": 50.0}}}
    alone = {"metrics": {"throughput.llama8b.decode.pagecast.out_tok_s": 150.0, "throughput.llama8b.chat.pagecast.out_tok_s": 60.0}}
    beside = {"metrics": {"throughput.llama8b.chat.pagecast.out_tok_s": 70.0, "throughput.llama8b.chat.vllm.out_tok_s": 35.0}}
    rows = {row.workload: row for row in figures.comparisons([alone, beside], anchors)}
    assert (rows["decode"].ratio, rows["decode"].same_run) == (1.5, False)
    assert (rows["chat"].ratio, rows["chat"].same_run) == (2.0, True)
    drawing = figures.picture(list(rows.values()))
    assert drawing.count("<rect") == 3 and "2.00" in drawing


def test_the_phases_of_a_start_add_up_to_it() -> None:
    phases = Phases({"start": 10.0, "weights": 12.0, "warm-up": 15.0}, ended=16.0)
    assert phases.seconds(17.5) == {"start": 2.0, "weights": 3.0, "warm-up": 1.0, "join": 1.5}
    assert Phases({"start": 1.0}).seconds(3.0) == {"start": 2.0, "join": 0.0}


def test_options_by_name_are_json_or_names() -> None:
    assert named_values(["num-frontends=2", "dtype=float32", "uds=null"]) == {"num_frontends": 2, "dtype": "float32", "uds": None}


class Counted:
    """An engine that takes a second for everything and ends its `last` run as it is told."""

    vocab_size = 32000

    def __init__(self, name: str, last: int, end: BaseException) -> None:
        self.name, self.left, self.end = name, last, end

    def run(self, workload: str, repetition: int, limit: int | None) -> tuple[float, int]:
        self.left -= 1
        if self.left < 0:
            raise self.end
        return 1.0, sum(count for _, count in workloads.make(workload))

    def device_s(self) -> None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize(("end", "kept"), [(KeyboardInterrupt(), 1), (SystemExit("the peer ended"), None)])
def test_what_was_measured_before_an_end_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: BaseException, kept: int | None
) -> None:
    monkeypatch.setattr(bench_throughput, "Pagecast", lambda options: Counted("pagecast", 99, end))
    monkeypatch.setattr(bench_throughput, "Peer", lambda *_: Counted("vllm", 4, end))
    parser = argparse.ArgumentParser()
    bench_throughput.add_arguments(parser)
    line = "--workload single --workload decode --warmup 0 --peer vllm --in-turn --results"
    with pytest.raises(SystemExit, match="not all was measured"):
        bench_throughput.run(parser.parse_args([*line.split(), str(tmp_path)]))
    (record,) = results.read_all(str(tmp_path))
    metrics, start = record["metrics"], "throughput.smol135m"
    assert metrics[f"{start}.single.ratio_vllm"] == 1.0
    assert metrics[f"{start}.decode.pagecast.repetitions"] == 3  # of ours, which had ended before
    assert metrics.get(f"{start}.decode.vllm.repetitions") == kept
    assert (f"{start}.decode.ratio_vllm" in metrics) == (kept is not None)


def test_a_workload_has_repetitions_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_throughput, "Pagecast", lambda options: Counted("pagecast", 4, AssertionError("run once too often")))
    totals = []
    monkeypatch.setattr(bench_throughput, "Progress", lambda total: totals.append(total) or Progress(total))
    parser = argparse.ArgumentParser()
    bench_throughput.add_arguments(parser)
    line = "--workload single --workload decode --warmup 0 --repetitions-of decode=1 --results"
    assert bench_throughput.run(parser.parse_args([*line.split(), str(tmp_path)])) == 0
    assert "fewer than three repetitions of decode;" in capsys.readouterr().out
    assert totals == [4]
    for wrong in ("decode", "dance=1", "decode=0"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--repetitions-of", wrong])


def test_one_start_is_not_told_as_one_with_a_full_cache() -> None:
    cold, warm = ({"first_token_s": seconds, "kv_tokens": 9, "phases": {"start": 1.0}} for seconds in (54.5, 11.9))
    assert set(metrics_of("m", [cold])) == {"startup.m.kv_tokens", "startup.m.first.first_token_s", "startup.m.first.phases.start"}
    assert metrics_of("m", [cold, warm, warm])["startup.m.last.first_token_s"] == 11.9
