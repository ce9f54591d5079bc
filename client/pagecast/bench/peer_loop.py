"""The loop of a peer process: settings first, then one run per line; answers are JSON lines. Knows no engine."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from pagecast.bench.engines import shifted

Run = Callable[[list[list[int]], list[int]], int]
"""(prompts, output counts) to the number of output tokens produced."""


def serve(start: Callable[[dict[str, Any]], Run]) -> None:
    """start: settings to a Run. File descriptors of the two pipes are the first two arguments of the process."""
    down, up = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")

    def answer(message: dict[str, Any]) -> None:
        up.write(json.dumps(message) + "\n")
        up.flush()

    settings = json.loads(down.readline())
    try:
        run = start(settings)
        answer({"ready": True})
        for line in down:
            ask = json.loads(line)
            work = shifted(ask["workload"], ask["repetition"], settings["vocab_size"], ask["limit"], settings["longest_first"])
            begin = time.perf_counter()
            produced = run([prompt for prompt, _ in work], [count for _, count in work])
            answer({"seconds": time.perf_counter() - begin, "output_tokens": produced})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"[:500]})
        raise
