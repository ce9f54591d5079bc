"""docs/metrics.md lists every metric and no other, in the words that the metrics have for themselves."""

from collections.abc import Iterator

import pytest
from architecture.source_tree import ROOT
from prometheus_client import CollectorRegistry

from pagecast_scheduler.engine import metrics
from pagecast_scheduler.frontend.metrics import FrontendMetrics

SUFFIXES = {"counter": "_total", "info": "_info"}


def rows(registry: CollectorRegistry) -> Iterator[str]:
    """Lines of the table: its name as it is scraped, without a histogram's endings."""
    for family in sorted(registry.collect(), key=lambda family: family.name):
        yield f"| `{family.name}{SUFFIXES.get(family.type, '')}` | {family.type} | {family.documentation} |"


def test_the_page_has_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[CollectorRegistry] = []
    monkeypatch.setattr(metrics, "start_http_server", lambda port, addr, registry: (served.append(registry), None))
    metrics.Metrics(1)
    listed = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `")]
    assert listed == [*rows(served[0]), *rows(FrontendMetrics().registry)]
