"""Children's output: whole lines in order, whatever the pieces; the last line is there when the child is."""

import json
import os

import pytest
from e2e import cli_server
from hypothesis import given
from hypothesis import strategies as st

from pagecast.cli import loading, serve
from pagecast_scheduler.launch.events import Failed, Ready, Stopping
from pagecast_scheduler.launch.output import Console, OutputPump, Stream


@given(st.lists(st.sampled_from(["a", "two words", "", "é"]), max_size=8), st.lists(st.integers(1, 6), max_size=20), st.booleans())
def test_lines_do_not_depend_on_how_they_were_cut(lines: list[str], cuts: list[int], ends: bool) -> None:
    stream = Stream("worker-0", -1)
    data = "\n".join(lines).encode() + (b"\n" if ends else b"")
    got: list[str] = []
    for size in cuts:
        piece, data = data[:size], data[size:]
        got += stream.lines(piece) if piece else []
    got += (stream.lines(data) if data else []) + stream.lines(b"")
    wanted = [line for line in lines if line]
    assert got == wanted and stream.last_line == (wanted[-1] if wanted else "")


def test_bytes_that_are_no_text_and_endless_lines_do_no_harm() -> None:
    stream = Stream("worker-0", -1)
    assert stream.lines(b"\xff\n") == ["\ufffd"]
    assert stream.lines(b"x" * 70_000) == ["x" * 70_000]


def test_a_stalled_reader_holds_nobody_up_and_learns_what_it_missed() -> None:
    reader, writer = os.pipe()
    console = Console(writer)
    for number in range(30_000):  # far more than a pipe and the queue hold
        console.write_line(f"line {number} " + "x" * 90)
    assert not console.flush(0.0)
    with os.fdopen(reader) as file:
        lines = [file.readline().rstrip() for _ in range(10_000)]
        console.write_line("the end")
        while lines[-1] != "the end":
            lines.append(file.readline().rstrip())
    missed = [line for line in lines if line.endswith("lines were dropped because nobody read them")]
    told = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert told == sorted(set(told)) and sum(int(line.split()[0]) for line in missed) + len(told) == 30_000
    console.write_line("to nobody")  # the reader has gone
    assert console.flush(30.0)
    os.close(writer)


def test_the_pump_reads_to_the_end() -> None:
    seen: list[tuple[str, str]] = []
    pump = OutputPump(lambda name, line: seen.append((name, line)))
    streams = {}
    for name in ("worker-0", "worker-1"):
        streams[name], writer = pump.open(name)
        os.write(writer, f"first of {name}\nlast of {name}".encode())
        os.close(writer)
    for name, stream in streams.items():
        assert stream.closed.wait(30) and stream.last_line == f"last of {name}"
    pump.close()
    assert sorted(seen) == [(name, f"{word} of {name}") for name in ("worker-0", "worker-1") for word in ("first", "last")]


def test_what_is_to_be_known_before_the_start_is_a_log_line_or_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(serve, "write_line", lines.append)
    for log_format in ("auto", "json", "console"):
        serve.Screen("m", None, log_format).warn("too little")
    for told in map(json.loads, lines[:2]):
        assert (told["process"], told["level"], told["event"]) == ("supervisor", "warning", "too little")
    assert lines[2] == "pagecast serve: too little"


def test_with_json_logs_every_line_of_either_stream_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def told(head: str | None, log_format: str) -> tuple[list[str], list[str]]:
        errors: list[str] = []
        monkeypatch.setattr(serve, "write_line", errors.append)
        monkeypatch.setattr(loading, "write_line", errors.append)
        screen = serve.Screen("m", head, log_format)
        screen.on_output("worker-0", "a library's warning")
        screen.on_output("worker-0", '{"event": "loaded"}')
        screen.on_event(Ready(() if head else ("b:2", "a:1", "a:1")))
        screen.on_event(Stopping(("frontend-0", "frontend-1")))
        screen.on_event(Failed("worker-0", 3, "no memory"))
        return capsys.readouterr().out.splitlines(), errors

    for log_format in ("auto", "console"):
        said, errors = told(None, log_format)
        assert said == ["serving m on a:1, b:2", "stopping frontend-0, frontend-1"]
        assert errors == ["a library's warning", '{"event": "loaded"}', "pagecast serve: worker-0 failed: no memory"]
    said, errors = told(None, "json")
    serving, stopping, output, loaded, failed = map(json.loads, [*said, *errors])
    assert (serving["event"], serving["model"], serving["addresses"], serving["level"]) == ("serving", "m", ["a:1", "b:2"], "info")
    assert (stopping["event"], stopping["names"]) == ("stopping", ["frontend-0", "frontend-1"])
    assert (output["process"], output["name"], output["line"]) == ("worker", "worker-0", "a library's warning")
    assert loaded == {"event": "loaded"} and (failed["event"], failed["name"], failed["why"]) == ("failed", "worker-0", "no memory")
    assert json.loads(told("h:1", "json")[0][0])["head"] == "h:1"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_the_roles_log_is_in_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with cli_server.serve("--executor", "oracle", "--log-format", "console", terminal=terminal) as served:
        assert served.end() == 0
    for role in ("scheduler", "frontend"):
        said = [line for line in served.lines if "process" in line and role in line]
        assert said and all(("\x1b[" in line) == terminal for line in said)
