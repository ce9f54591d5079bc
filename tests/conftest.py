"""For every test: what is drawn is drawn alike in every run; whatever a server answers with an error, no word of it comes from the
inside; and what it starts has an end."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import leftovers
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Two tests at a time share two cores. A second thread of torch takes a third more processor time for the same products, of which a core
that another test needs is what is lost; and what one thread adds up does not depend on how many cores there are."""

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat")
"""How long an example takes says how busy the machine is, and a run that fails has to fail again for whoever looks into it. Other
examples: --hypothesis-profile=explore."""

INNER = re.compile(r"Traceback|\.py\b|/work/|/tmp/|site-packages|object at 0x|\b[A-Z][A-Za-z]+(?:Error|Exception)\b")
"""Names of Python classes, source files, paths and addresses."""
_found: list[str] = []


def _judge(details: str | None, trailers: Any) -> None:
    """Keeps what should not have been said. Without our trailer the words are the local gRPC library's, which may name a socket."""
    packed = dict(trailers or ()).get("grpc-status-details-bin", b"")
    if packed:
        text = f"{details} {packed.decode(errors='replace')}"
        _found.extend(match.group() for match in INNER.finditer(text))


_made_aio = grpc.aio.AioRpcError.__init__


def _make_aio(self: Any, *args: Any, **options: Any) -> None:
    _made_aio(self, *args, **options)
    _judge(self.details(), self.trailing_metadata())


grpc.aio.AioRpcError.__init__ = _make_aio  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: no collection looks at it again, of which tests ask for hundreds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_inner_reaches_a_client() -> Iterator[None]:
    _found.clear()
    yield
    assert _found == []


@pytest.fixture(autouse=True)
def torch_draws_the_same() -> None:
    """What a test draws does not depend on which tests ran before it in its process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left_behind() -> Iterator[None]:
    """No process that a test has started outlives the run, nor a socket or port of one."""
    yield
    assert leftovers.wait_for_none() == []
