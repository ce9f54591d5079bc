"""How far a worker's start is, told to the scheduler and left in a file for whoever shows a progress bar."""

import json
import os
import time
from pathlib import Path
from typing import Final

from pagecast_wire.intake import LoadProgress
from pagecast_worker.link import Link

_EVERY_S: Final = 0.1


class ProgressReport:
    """Callable that an executor reports to. Passes on a phase's first and last report and at most ten a second between.

    The file RUN_DIR/worker-<rank>.progress holds {"phase", "done", "total"} and is replaced as a whole.
    """

    def __init__(self, link: Link, run_dir: str, rank: int) -> None:
        self._link = link
        self._path = Path(run_dir) / f"worker-{rank}.progress"
        self._phase, self._due = "", 0.0

    def __call__(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if progress.phase == self._phase and progress.done < progress.total and now < self._due:
            return
        self._phase, self._due = progress.phase, now + _EVERY_S
        self._link.send(progress)
        try:
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps({"phase": progress.phase, "done": progress.done, "total": progress.total}))
            os.replace(draft, self._path)
        except OSError:
            pass  # a full disk may cost the progress bar, never the worker
