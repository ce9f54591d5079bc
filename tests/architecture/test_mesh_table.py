"""docs/mesh.md maps every known defect and every topic of the transport to tests that exist."""

import ast
import re

from architecture.source_tree import ROOT

TEXT = (ROOT / "docs/mesh.md").read_text()
TOPICS = {
    "deadline", "cancel", "idle timers", "keepalive", "connection age", "drain", "drain of a gateway", "health", "reflection", "balancing",
    "retry", "hedging", "compression", "size", "concurrency", "connection flood", "metadata", "auth", "mTLS reload", "grpc-web, Connect",
    "observability",
}  # fmt: skip
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( \*mesh\*)?")


def rows(section: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    part = TEXT.split(f"## {section}")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("|")]
    return table[2:]


def test_every_defect_and_every_topic_has_a_row_with_tests() -> None:
    defects, topics = rows("Defects of others"), rows("Transport")
    assert [row[0].strip("| ") for row in defects] == [str(number) for number in range(1, 15)]
    assert {row[0].strip("| ") for row in topics} == TOPICS and len(topics) == len(TOPICS)
    assert [row[0] for row in (*defects, *topics) if not REFERENCE.search(row[-1])] == []


def test_every_test_named_there_exists_and_runs_where_it_says() -> None:
    found = REFERENCE.findall(TEXT)
    assert len(found) > 50
    for path, name, mark in found:
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"
        is_mesh = any("mesh" in ast.dump(decorator) for decorator in functions[name].decorator_list)
        assert is_mesh == bool(mark), f"{path}::{name} is marked {is_mesh}, the page says {bool(mark)}"
