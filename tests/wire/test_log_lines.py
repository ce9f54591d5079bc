"""Log lines: their fields and forms, what a traceback may say, and readers that go away."""

import io
import json
import os
from collections.abc import Iterator

import pytest
import structlog

from pagecast_wire import log_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def kept_settings() -> Iterator[None]:
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


def test_every_line_has_the_fields_of_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines.configure("json", "info", process="worker", rank=3)
    log = structlog.get_logger("pagecast.test")
    log.debug("not said")
    log.info("said", step=1)
    log_lines.set_level("debug")  # by loggers that exist too
    log.debug("said now")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["process"], first["rank"], first["event"], first["step"], first["level"]) == ("worker", 3, "said", 1, "info")
    assert (second["event"], second["level"]) == ("said now", "debug")


def test_auto_is_json_where_nobody_sits_at_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log_lines.configure("auto", "info")
    structlog.get_logger().info("read by a machine")
    assert json.loads(capsys.readouterr().err)["event"] == "read by a machine"

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    log_lines.configure("auto", "info")
    structlog.get_logger().info("read by people")
    assert "read by people" in screen.getvalue() and not screen.getvalue().startswith("{")


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (io.StringIO, {}, False),
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (io.StringIO, {"FORCE_COLOR": "", "NO_COLOR": ""}, False),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_only_what_ends_up_on_a_terminal_is_coloured(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], environment: dict[str, str], coloured: bool, trace: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    log_lines.configure("console", "info", process="worker")
    structlog.get_logger().warning("for people", exc_info=ValueError("bad") if trace else None)
    assert "for people" in written.getvalue() and ("ValueError" in written.getvalue()) == trace
    assert ("\x1b" in written.getvalue()) == coloured


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.filterwarnings("error")
def test_a_traceback_has_lines_and_no_values(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    log_lines.configure(log_format, "info")
    prompt = "ame" + "thyst"
    try:
        int(f"not a number: {len(prompt)}")
    except ValueError:
        structlog.get_logger().error("broken", exc_info=True)
    said = capsys.readouterr().err
    assert "Traceback" in said and "test_log_lines.py" in said and prompt not in said


def test_a_reader_that_has_gone_costs_its_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log_lines.configure("json", "info")
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        structlog.get_logger().info("to nobody")
    structlog.get_logger().info("to a closed file")
