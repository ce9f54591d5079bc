"""Loading progress: the first and the last report of a phase always pass, floods between them do not."""

import json
from pathlib import Path
from typing import Any

from pagecast_wire.intake import LoadProgress
from pagecast_worker.progress import ProgressReport


class Sent:
    """A link that only remembers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def test_a_flood_is_thinned_and_the_ends_of_phases_are_kept(tmp_path: Path) -> None:
    link = Sent()
    report = ProgressReport(link, str(tmp_path), 3)  # type: ignore[arg-type]
    for done in range(10_001):
        report(LoadProgress(rank=3, phase="weights", done=done, total=10_000))
    report(LoadProgress(rank=3, phase="warm-up", done=0, total=2))
    told = [(m.phase, m.done) for m in link.messages]
    assert told[0] == ("weights", 0) and told[-2:] == [("weights", 10_000), ("warm-up", 0)]
    assert len(told) < 1000
    assert json.loads((tmp_path / "worker-3.progress").read_text()) == {"phase": "warm-up", "done": 0, "total": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["worker-3.progress"]
