"""Rules of the house that a program can check: sizes, no pickle, no globals that hide in module names, no registry hosts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.source_tree import ROOT, sources, tracked

MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 450, 50, 120
"""Lines. A Triton kernel is one function by nature and gets more."""

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "allow_pickle", "broadcast_object_list", "all_gather_object", "gather_object"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "shared", "stuff"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file_keeps_the_rules(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE, "split it by concept"
    assert path.stem not in VAGUE
    assert ast.get_docstring(tree) or not text.strip(), "say what the module owns"
    assert [found for node in ast.walk(tree) for found in pickles(node)] == []
    assert list(long_functions(tree)) == []


def pickles(node: ast.AST) -> Iterator[str]:
    """Names of whatever in this node could deserialize an object."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
        yield str(node.module)
    elif isinstance(node, ast.Attribute):
        if node.attr in BANNED_ATTRIBUTES or (node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"):
            yield node.attr
    elif isinstance(node, ast.keyword) and node.arg in BANNED_ATTRIBUTES:
        yield str(node.arg)


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.dump(decorator) for decorator in node.decorator_list)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (MAX_KERNEL if kernel else MAX_FUNCTION):
                yield f"{node.name}: {lines} lines"


def test_the_rules_can_fail() -> None:
    bad = ast.parse("import pickle\nfrom dill import x\ntorch.load(f)\nsocket.recv_pyobj()\nnp.load(f, allow_pickle=True)\n")
    assert sorted(found for node in ast.walk(bad) for found in pickles(node)) == ["allow_pickle", "dill", "load", "pickle", "recv_pyobj"]
    long = "def f():\n" + "    x = 1\n" * MAX_FUNCTION
    assert list(long_functions(ast.parse(long))) == [f"f: {MAX_FUNCTION + 1} lines"]


def test_no_package_registry_is_named() -> None:
    hosts = [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"), ("download.pytorch", "org")]
    names = [".".join(host).encode() for host in hosts]
    assert [str(path.relative_to(ROOT)) for path in tracked() for name in names if name in path.read_bytes()] == []


def test_tests_make_no_packages_and_have_unique_names() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert [path for path in files if path.name == "__init__.py"] == []
    names = [path.name for path in files if path.name.startswith("test_")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
