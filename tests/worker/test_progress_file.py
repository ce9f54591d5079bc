"""A worker's progress file is a courtesy: that it cannot be written ends nothing."""

from pathlib import Path
from typing import Any

from pagecast_wire.intake import LoadProgress
from pagecast_worker.progress import ProgressReport


class Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_file_that_cannot_be_written_costs_only_the_bar(tmp_path: Path) -> None:
    link: Any = Link()
    ProgressReport(link, str(tmp_path / "gone"), 0)(LoadProgress(rank=0, phase="weights", done=1, total=1))
    assert len(link.sent) == 1
