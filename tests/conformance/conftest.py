"""One real cluster in float32 for all tests here."""

from collections.abc import Iterator

import pytest
from e2e.cli_server import Served, serve


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serve("--dtype", "float32", "--max-num-seqs", "32", "--cpu-kv-gib", "0.5") as made:
        yield made
