"""Only monotonic clocks decide anything (I10): where the wall clock may be asked, and for what."""

import ast
from collections.abc import Iterator

from architecture.source_tree import ROOT, sources

ALLOWED = {
    "client/pagecast/bench/results.py": "when a measurement was made",
    "client/pagecast/cli/bench_kernels.py": "when a table was made",
    "client/pagecast/cli/serve.py": "the stamp of a log line",
    "client/pagecast/cli/token.py": "when a new token is to expire",
    "scheduler_service/pagecast_scheduler/frontend/auth_file.py": "an example in an error",
    "scheduler_service/pagecast_scheduler/frontend/authorizer.py": "whether a token has expired",
    "scheduler_service/pagecast_scheduler/frontend/chat.py": "the date in a chat template",
    "scheduler_service/pagecast_scheduler/frontend/compat/vllm_engine.py": "the stamp of a load report",
    "scheduler_service/pagecast_scheduler/frontend/generation.py": "gRPC's time_remaining, asked once as a call begins",
    "scheduler_service/pagecast_scheduler/frontend/tracing.py": "the times of a span",
    "scheduler_service/pagecast_scheduler/gateway/app.py": "when an answer was created",
}
OF_TIME = {"time", "time_ns", "ctime", "asctime", "gmtime", "localtime", "strftime", "clock_gettime", "clock_gettime_ns"}
OF_DATES = {"now", "utcnow", "today"}
OF_OTHERS = {
    "time_remaining",  # grpc.aio counts from time.time()
    "create_time", "boot_time",  # psutil's
    "getmtime", "getctime", "getatime", "uuid1",
}  # fmt: skip


def wall_clocks(tree: ast.AST) -> Iterator[str]:
    """Names of what in a module's code asks the wall clock, or gives times of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if alias.name in OF_TIME)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr if isinstance(node.value, ast.Attribute) else ""
            is_date = node.attr in OF_DATES and owner in ("datetime", "date")
            if node.attr in OF_OTHERS or is_date or (node.attr in OF_TIME and owner == "time"):
                yield node.attr


def test_the_wall_clock_is_asked_where_it_may_be_and_nowhere_else() -> None:
    found = {str(path.relative_to(ROOT)): list(wall_clocks(ast.parse(path.read_text()))) for path in sources()}
    assert {path for path, names in found.items() if names} == set(ALLOWED)
    assert found["scheduler_service/pagecast_scheduler/frontend/generation.py"] == ["time_remaining"]


def test_the_rule_can_fail() -> None:
    bad = (
        "from time import monotonic, time_ns\nimport time, datetime\ntime.time()\nf(time.localtime)\ndatetime.now(UTC)\n"
        "datetime.datetime.utcnow()\ncontext.time_remaining()\nuuid.uuid1()\ntime.monotonic()\nself.now()\n"
    )
    expected = ["localtime", "now", "time", "time_ns", "time_remaining", "utcnow", "uuid1"]
    assert sorted(wall_clocks(ast.parse(bad))) == expected
