"""What is drawn and reckoned from results: workloads beside vLLM as a picture, and what a million tokens cost at a GPU's price."""

from dataclasses import dataclass
from html import escape
from typing import Any

WORKLOADS = ("single", "decode", "chat", "seed64", "short", "prefill", "prefix")
_RATE = {"prefill": "tot_tok_s", "prefix": "req_s"}
"""What a workload is compared by; output tokens a second otherwise."""


@dataclass(frozen=True)
class Comparison:
    """One workload of a shape: rates of both engines in `unit`, and whether both were measured in the same run."""

    shape: str
    workload: str
    unit: str
    ours: float
    peer: float
    same_run: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def comparisons(records: list[dict[str, Any]], anchors: dict[str, Any]) -> list[Comparison]:
    """The newest figure of every workload, beside vLLM of the same run, or of the anchors where it did not run along."""
    found = []
    for shape in ("llama8b", "smol135m"):
        for workload in WORKLOADS:
            unit = _RATE.get(workload, "out_tok_s")
            start = f"throughput.{shape}.{workload}"
            newest = next((r["metrics"] for r in reversed(records) if f"{start}.pagecast.{unit}" in r["metrics"]), None)
            along = next((r["metrics"] for r in reversed(records) if f"{start}.vllm.{unit}" in r["metrics"]), None)
            metrics = along or newest
            peer = along[f"{start}.vllm.{unit}"] if along else anchors.get(shape, {}).get(workload, {}).get(unit)
            if metrics is not None and peer and f"{start}.pagecast.{unit}" in metrics:
                found.append(Comparison(shape, workload, unit, metrics[f"{start}.pagecast.{unit}"], peer, along is not None))
    return found


def dollars_per_million(tokens_per_second: float, dollars_per_hour: float) -> float:
    """Of tokens that a GPU makes all the time."""
    return dollars_per_hour / 3600.0 / tokens_per_second * 1e6


def picture(rows: list[Comparison]) -> str:
    """An SVG of bars: our rate over vLLM's, one row a workload, with a line at 1."""
    left, width, height, step = 170, 420, 30 + 26 * len(rows) + 16, 26
    longest = max((row.ratio for row in rows), default=1.0)
    scale = width / max(longest, 1.2)
    one = left + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{left + width + 90}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18">times the rate of vLLM on the same GPU (1 = equal)</text>',
    ]
    for number, row in enumerate(rows):
        y = 30 + step * number
        colour = "#2a6f4e" if row.shape == "llama8b" else "#3b5b92"
        name = f"{'8B' if row.shape == 'llama8b' else '135M'} {row.workload}"
        lines += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{row.ratio * scale:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{left + row.ratio * scale + 6:.1f}" y="{y + 15}">{row.ratio:.2f}</text>',
        ]
    lines += [f'<line x1="{one:.1f}" y1="26" x2="{one:.1f}" y2="{height - 12}" stroke="black" stroke-dasharray="4 3"/>', "</svg>"]
    return "\n".join(lines) + "\n"
