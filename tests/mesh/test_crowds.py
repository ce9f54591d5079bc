"""A small run of `make load`: no stream is lost, and stalled readers cost the server bounded memory."""

import json
from pathlib import Path

import pytest
from e2e.cli_server import pagecast


@pytest.mark.mesh
def test_many_streams_and_stalled_readers_lose_nothing(tmp_path: Path) -> None:
    done = pagecast(
        "bench", "streams", "--streams", "300", "--seconds", "8", "--tokens", "60", "--stalled", "300", "--stalled-seconds", "5",
        "--settle-seconds", "30", "--repetitions", "1", "--results", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-streams.json")
    metrics = json.loads(path.read_text())["metrics"]
    assert metrics["streams.finished"] >= 300 and metrics["streams.lost"] == 0
    assert metrics["streams.rss_mib.last_third"] < metrics["streams.rss_mib.first_third"] + 64
    assert metrics["stalled.rss_growth_mib"] < 64
